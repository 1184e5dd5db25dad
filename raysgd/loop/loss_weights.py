"""The weights of losses: an update uses the mean over all items of all workers, or a sum."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from raysgd.data.partition import UpdatePlan


class LossCount(NamedTuple):
    """What is known about a loss of a micro-batch. By default, it is a mean over its samples."""

    items: float | None = None  # that the loss is a mean over, if user code or raysgd counts them
    samples: float | None = None  # rows of the batch, if the ``train_batch`` of raysgd counts them
    is_sum: bool = False  # a sum over samples, and not a mean

    def with_samples(self) -> LossCount:
        """Return the count to use if workers do not know the sizes of all batches."""
        return self if self.is_sum or self.items is not None else self._replace(items=self.samples)


_UNKNOWN = LossCount()


class Factors(NamedTuple):
    """Factors that make gradients parts of the mean over an update."""

    earlier: float  # of the gradients of earlier micro-batches
    loss: float


class LossWeights:
    """Gives each loss of an update its weight: add up sums, and divide once.

    An update is ``sum of (items * gradient of their mean loss) / total``. `num_workers` workers
    average their gradients, so a loss has the weight ``items * num_workers / total``. Until the
    last micro-batch, a planned total replaces the total. The first loss of the last micro-batch
    multiplies earlier gradients by ``planned / total``. The five cases are::

        a loss that is           items              planned total      total
        1 a mean, counted        its count          previous, rounded  sum over all workers
        2 a mean over samples    samples            all samples        all samples
        3 of unknown samples     part of a batch    steps * workers    steps * workers
        4 of repeated samples    0                  as above           as above
        5 a sum                  the weight is `num_workers`, or 0 for repeated samples

    The total and the factor are equal on all workers. Only case 1 communicates: once per update or
    optimizer, and once more in the first update of a generation if it has several micro-batches. A
    micro-batch without a loss has no items. In cases 2 and 3, several workers then do not know the
    total, so `StepChecks` rejects a loss after it. If workers do not know the sizes of all batches,
    `LossCount.with_samples` makes cases 2 and 3 of the default ``train_batch`` case 1. With
    fixed parts, the total is that of case 2 in all cases, and the exchange divides by counts.
    """

    def __init__(self, update: Any) -> None:  # an Update
        self._update = update
        self.expected_total: float | None = None
        """Planned total of counted items, equal on all workers. None: unknown."""
        self.reset()

    def reset(self) -> None:
        self.uses_backward = False  # user code has passed a loss to `backward` of the operator
        self.has_loss = False  # the current micro-batch has a loss of ``operator.backward``
        self.has_earlier_losses = False  # an earlier micro-batch of the update has one
        self.has_gap = False  # an earlier micro-batch of the update has none
        self.is_empty = False  # the losses of the next optimizer step have no items on any worker
        self._awaits_count = True  # the next loss sets the count of the micro-batch
        self._count = _UNKNOWN  # of the newest loss
        self._items = self._items_so_far = self._divisor = 0.0

    def begin_micro_batch(self) -> None:
        """Begin a micro-batch."""
        self.has_earlier_losses = self.uses_backward
        self.has_gap = self._update.index > 0 and (self.has_gap or not self.has_loss)
        self.has_loss, self._awaits_count = False, True

    def end_optimizer_step(self) -> None:
        """Allow losses with another count after the update of an optimizer."""
        self._awaits_count = self._awaits_count or not self.has_earlier_losses

    @property
    def counted_items(self) -> float | None:
        """Items of the micro-batch, if user code has counted those of the newest loss."""
        return None if self._count.items is None else self._items

    def add(
        self,
        count: LossCount,
        num_workers: int = 1,
        add_up: Callable[[float], float] = lambda number: number,
    ) -> Factors:
        """Add a loss. `add_up` returns the sum of a number over the workers.

        Raises:
            ValueError: If another loss of the micro-batch has another count in an update of several
                micro-batches, or if user code counts items only for some batches of an update.
        """
        update = self._update
        if update.index < 0:
            self.reset()
        is_repeated, self.has_loss, self.uses_backward = update.micro_batch.is_repeated, True, True
        if count.is_sum:
            self.is_empty = False
            return Factors(1.0, 0.0 if is_repeated else float(num_workers))
        earlier = 1.0
        # Whether workers communicate must not depend on the numbers.
        if self._awaits_count or (count.items is not None and update.has_one_micro_batch):
            self.is_empty = self.is_empty or self._awaits_count
            self._add_items(count, is_repeated)
            # An update of one micro-batch needs no plan.
            planned = 0.0 if update.has_one_micro_batch else self._plan_total(num_workers, add_up)
            is_exact = update.in_last_micro_batch and not update.has_fixed_parts
            self._divisor = self._exact_total(num_workers, add_up) if is_exact else planned
            self.is_empty = self.is_empty and not self._divisor
            if self.has_earlier_losses and self._divisor:
                is_planned = math.isclose(self._divisor, planned, rel_tol=1e-12)  # up to rounding
                earlier = 1.0 if is_planned else planned / self._divisor
        elif count.items not in (None, self._count.items):
            raise ValueError(
                f"backward(num_samples={count.items!r}) follows num_samples={self._count.items} "
                "for another loss of the same batch. With accumulation or equal bits, pass the "
                "same number."
            )
        return Factors(earlier, self._items * num_workers / self._divisor if self._items else 0.0)

    def _add_items(self, count: LossCount, is_repeated: bool) -> None:
        if self.has_earlier_losses and (self._count.items is None) != (count.items is None):
            raise ValueError(
                "backward(num_samples=...) was passed for some batches of an accumulation "
                "group. Pass it for all of them or for none."
            )
        self._count, items = count, count.items
        if items is None:
            items = self._update.micro_batch.num_samples
        if items is None:
            items = self._update.micro_batch.weight
        self._items = 0.0 if is_repeated else float(items)
        self._items_so_far = self._items + (self._items_so_far if self.has_earlier_losses else 0.0)
        self._awaits_count = False

    def _plan_total(self, num_workers: int, add_up: Callable[[float], float]) -> float:
        if self._update.has_fixed_parts:
            return float(self._update.plan.total_samples or 1)
        if self._count.items is not None:
            if self.expected_total is None:  # the first update of a generation
                self.expected_total = _power_of_two(self._update.num_planned * add_up(self._items))
            return self.expected_total
        plan: UpdatePlan = self._update.plan
        if plan.total_samples is None:
            return float(plan.num_steps * num_workers)
        return plan.total_samples if num_workers > 1 else plan.num_samples

    def _exact_total(self, num_workers: int, add_up: Callable[[float], float]) -> float:
        if self._count.items is not None:
            total = add_up(self._items_so_far)
            self.expected_total = _power_of_two(total)
            return total
        plan: UpdatePlan = self._update.plan
        if num_workers > 1 and plan.total_samples is not None:
            return plan.total_samples
        return self._items_so_far * num_workers  # the mean of each worker weighs the same


def _power_of_two(number: float) -> float:
    """Return a power of two near a number. To multiply by it does not round."""
    return 2.0 ** round(math.log2(number)) if number else 1.0
