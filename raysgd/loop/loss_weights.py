"""The weights of the losses of an update, which make it that of one process with all samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

from raysgd.data.partition import MicroBatchPlan, UpdatePlan


class LossCount(NamedTuple):
    """What is known about a loss of a micro-batch. By default, it is a mean over its samples."""

    num_items: float | None = None  # that it is a mean over, if user code or raysgd counts them
    num_samples: float | None = None  # of the batch, if ``train_batch`` of raysgd counts them
    is_sum: bool = False  # a sum over samples, and not a mean

    def with_samples(self) -> LossCount:
        """Return the count to use if workers do not know the sizes of all batches."""
        is_known = self.is_sum or self.num_items is not None
        return self if is_known else self._replace(num_items=self.num_samples)


Reduce = Callable[[float], float]  # returns the sum of a number over the workers


class Factors(NamedTuple):
    """Factors that make gradients parts of the mean over an update."""

    earlier: float  # of the gradients of earlier micro-batches
    loss: float


class ItemCounts(NamedTuple):
    """The items of the newest losses on this worker, without repeated samples."""

    num_items: float | None = None  # the count of the losses, if they have one
    in_micro_batch: float = 0.0
    so_far: float = 0.0  # in the update


class MicroBatchOfUpdate(Protocol):
    """What the weights depend on: an `Update`, whose module imports this one."""

    plan: UpdatePlan
    micro_batch: MicroBatchPlan
    micro_batch_index: int
    in_last_micro_batch: bool

    @property
    def num_micro_batches(self) -> int: ...

    @property
    def has_one_micro_batch(self) -> bool: ...


class LossWeights:
    """Gives each loss of an update its weight: add up sums, and divide once.

    An update is ``sum of (items * gradient of their mean loss) / total``. n workers average their
    gradients (n is `num_averaging_workers`), so a loss has the weight ``items * n / total``. Until
    the last micro-batch, a planned total replaces the total. The first loss of the last micro-batch
    multiplies earlier gradients by ``planned / total``. The five cases are::

        a loss that is           items              planned total      total
        1 a mean, counted        its count          previous, rounded  sum over all workers
        2 a mean over samples    samples            all samples        all samples (one worker: own)
        3 of unknown samples     part of a batch    steps * workers    steps * workers
        4 of repeated samples    0                  as above           as above
        5 a sum                  the weight is n, or 0 for repeated samples

    The total and the factor are equal on all workers. Only case 1 communicates: once per update or
    optimizer, and once more in the first update of a generation if it has several micro-batches. A
    micro-batch without a loss has no items. In cases 2 and 3, several workers then do not know the
    total, so `StepChecks` rejects a loss after it. If PyTorch workers do not know the sizes of all
    batches, `LossCount.with_samples` makes cases 2 and 3 of the default ``train_batch`` case 1.
    If the exchange divides by counts, the total is that of case 2 in all cases.

    If rank 0 has 3 samples of each step and rank 1 has 1, an update of two steps has 8:

    >>> from raysgd.data.partition import EpochPartition
    >>> from raysgd.loop.update import Update
    >>> for rank in range(2):
    ...     update, partition = Update(), EpochPartition(8, 2, 2, rank, shares=(3, 1))
    ...     update.begin(partition.plan(sizes=(4, 4)))
    ...     update.begin_micro_batch(update.plan.micro_batches[0], is_last=False)
    ...     print(update.loss_weights.add(LossCount(), num_averaging_workers=2))
    Factors(earlier=1.0, loss=0.75)
    Factors(earlier=1.0, loss=0.25)

    Only methods write fields. `add` replaces the newest items as a whole.
    """

    def __init__(self, update: MicroBatchOfUpdate) -> None:
        self._update = update
        self._expected_total: float | None = None
        """Planned total of counted items, equal on all workers. None: unknown."""
        self.reset()

    def reset(self) -> None:
        self.has_loss = False  # the current micro-batch has a loss of ``operator.backward``
        self.num_earlier_micro_batches = 0  # earlier micro-batches of the update that have one
        self.has_no_items = False  # on all workers, so that the next optimizer step is skipped
        self.awaits_count = True  # the next loss sets the count of the micro-batch
        self._newest = ItemCounts()
        self._divisor = 1.0  # total or planned total of the newest losses

    def begin_generation(self) -> None:
        """Forget the expected total, because new workers must use the same number."""
        self._expected_total = None

    def begin_micro_batch(self) -> None:
        self.num_earlier_micro_batches += self.has_loss
        self.has_loss, self.awaits_count = False, True

    def end_step(self) -> None:
        # The next loss may be for another optimizer, and sets the count again. With earlier
        # micro-batches, the losses of all optimizers share the count of the first.
        self.awaits_count = self.awaits_count or not self.num_earlier_micro_batches

    def set_total_items(self, num_items: float) -> float:
        """Set the total that the exchange has counted, and return the factor of its sums.

        Without items, skip the next step.
        """
        self.has_no_items = not num_items
        return self._divisor / (num_items or 1)

    @property
    def uses_backward(self) -> bool:
        """Whether user code has passed a loss of the update to `backward` of the operator."""
        return self.has_loss or self.num_earlier_micro_batches > 0

    @property
    def counted_items(self) -> float | None:
        """Items of the micro-batch, if user code has counted those of the newest loss."""
        return None if self._newest.num_items is None else self._newest.in_micro_batch

    def add(
        self,
        count: LossCount,
        num_averaging_workers: int = 1,
        all_reduce: Reduce = float,
        divides_by_counts: bool = False,
    ) -> Factors:
        """Add a loss. The arguments after `count` are properties of the `GradientExchange`.

        Raises:
            ValueError: If another loss of the micro-batch has another count in an update of several
                micro-batches, or if user code counts items only for some batches of an update.
        """
        update, num_items = self._update, count.num_items
        self.has_loss = True
        # In a loop of user code, whose updates never open, each loss is an update.
        self.awaits_count = self.awaits_count or update.micro_batch_index < 0
        if count.is_sum:
            self.has_no_items = False
            return Factors(
                1.0, 0.0 if update.micro_batch.is_repeated else float(num_averaging_workers)
            )
        earlier = 1.0
        # Whether workers communicate must not depend on the numbers.
        if self.awaits_count or (num_items is not None and update.has_one_micro_batch):
            self._newest = self._items_of_loss(num_items)
            planned = total = float(update.plan.total_samples or 1)
            if not divides_by_counts:
                planned, total = self._totals(num_averaging_workers, all_reduce)
            if total or self.awaits_count:  # an earlier loss of the batch may have had items
                self._divisor, self.has_no_items = total, not total
            self.awaits_count = False
            if self.num_earlier_micro_batches and total:
                is_as_planned = math.isclose(total, planned, rel_tol=1e-12)
                earlier = 1.0 if is_as_planned else planned / total
        elif num_items not in (None, self._newest.num_items):
            raise ValueError(
                f"backward(num_items={num_items!r}) follows num_items={self._newest.num_items} for "
                "another loss of the same batch. With accumulation or equal bits, pass the same "
                "number."
            )
        items = self._newest.in_micro_batch
        return Factors(earlier, items * num_averaging_workers / self._divisor if items else 0.0)

    def _items_of_loss(self, num_items: float | None) -> ItemCounts:
        micro_batch, earlier = self._update.micro_batch, self._newest
        if self.num_earlier_micro_batches and (earlier.num_items is None) != (num_items is None):
            raise ValueError(
                "backward(num_items=...) was passed for some batches of an accumulation "
                "group. Pass it for all of them or for none."
            )
        items = micro_batch.num_samples if num_items is None else num_items
        if items is None:
            items = micro_batch.weight
        items = 0.0 if micro_batch.is_repeated else float(items)
        so_far = items + (earlier.so_far if self.num_earlier_micro_batches else 0.0)
        return ItemCounts(num_items, items, so_far)

    def _totals(self, num_averaging_workers: int, all_reduce: Reduce) -> tuple[float, float]:
        """Return the planned total, and the total, or the planned one until it is known."""
        update, plan, (num_items, items, so_far) = self._update, self._update.plan, self._newest
        if num_items is not None:
            # An update of one micro-batch needs no plan.
            if self._expected_total is None and not update.has_one_micro_batch:
                self._expected_total = _power_of_two(update.num_micro_batches * all_reduce(items))
            planned = total = self._expected_total or 0.0
            if update.in_last_micro_batch:
                total = all_reduce(so_far)
                self._expected_total = _power_of_two(total)
            return planned, total
        if num_averaging_workers > 1 and plan.total_samples is not None:
            return plan.total_samples, plan.total_samples
        is_known = plan.total_samples is not None
        planned = plan.num_samples if is_known else float(plan.num_steps * num_averaging_workers)
        # The mean of each worker weighs the same.
        return planned, so_far * num_averaging_workers if update.in_last_micro_batch else planned


def _power_of_two(number: float) -> float:
    """Return a power of two near a number. To multiply by it does not round."""
    return 2.0 ** round(math.log2(number)) if number else 1.0
