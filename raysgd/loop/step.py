"""One update of the optimizers: its micro-batches, the weights of their losses, and its end.

A step is one batch of the loader on each worker; `global_step` counts steps. An update has one
step, or several with gradient accumulation. A step has several micro-batches if its batch is split.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from raysgd.data.partition import MicroBatch, UpdatePlan


class WarmedUp(BaseException):
    """Raised when a warm-up has computed its gradients. User code must not catch it."""


class UpdateTransaction:
    """The update in progress on this worker, up to its commit or roll-back.

    The loop begins each micro-batch, and passes the transaction to the hooks of all features. The
    docstring of `raysgd.loop.loop` shows the life of an update. Without a loop, each batch is one.
    Each worker has one object. `commit` and `roll_back` reset it for the next update.
    """

    def __init__(self) -> None:
        self.optimizers: Sequence[Any] = ()
        self.is_warm_up = False  # the update ends before an optimizer updates
        self.is_partial = False  # a discarded update left changes that no feature could restore
        self.reference: float | None = None
        """Planned items of all workers in an update, if items are counted. None: unknown."""
        self._most_updates: Counter[int] = Counter()
        self._reset()

    def _reset(self) -> None:
        self.is_open = False  # has a batch, and was neither committed nor discarded
        self.updating: Any = None  # the optimizer whose step runs
        self.in_helper = False  # the optimizer's step runs within ``optimizer_step``
        # Batches of the loader, to train them again. None: the source can read the batch again.
        self.drawn: list[Any] = []
        self.plan = UpdatePlan()
        self.num_planned = 1  # micro-batches of the update
        self.is_split = False  # batches are trained in parts
        self.index = -1  # of the current micro-batch; -1 before the first
        self._updates: Counter[int] = Counter()
        self.has_earlier_losses = self.has_loss = False
        self._count: float | None = None  # passed with the newest loss
        self._counts_items = False
        self._items = self._num_items = self._total = 0.0
        self._set(MicroBatch(), is_last=True)

    def _set(self, micro_batch: MicroBatch, is_last: bool) -> None:
        self.micro_batch, self.is_last = micro_batch, is_last
        self.stepped: set[int] = set()  # optimizers whose step was requested in this micro-batch
        self.has_earlier_losses = self.has_earlier_losses or self.has_loss
        self.has_loss = self._is_weighted = False
        # What `train_batch` of raysgd knows about its loss:
        self.num_samples: float | None = None
        self.is_sum = False  # a sum over samples, and not a mean

    # ---- the life of an update

    def draw(self, batch: Any) -> None:
        """Add a batch of the loader, and open a new update if none is open."""
        self.is_open = True
        self.drawn.append(batch)

    def begin_plan(self, plan: UpdatePlan) -> None:
        """Set the micro-batches of the update, before the first one begins."""
        self.plan, self.num_planned = plan, len(plan.micro_batches)
        self.is_split = self.num_planned > plan.num_steps

    def split(self, num_parts: int) -> None:
        """Record that each planned micro-batch is trained in `num_parts` parts."""
        if num_parts > 1:
            self.is_split, self.num_planned = True, len(self.plan.micro_batches) * num_parts

    def begin(self, micro_batch: MicroBatch, is_last: bool = True) -> None:
        """Begin a micro-batch. The update follows directly if it `is_last`."""
        self.is_open = True
        self.index += 1
        self._set(micro_batch, is_last)

    @property
    def is_only(self) -> bool:
        """Whether the update has only this micro-batch."""
        return self.index <= 0 and self.is_last

    @property
    def uses_backward(self) -> bool:
        """Whether user code has passed a loss to `backward` of the operator."""
        return self.has_loss or self.has_earlier_losses

    @property
    def has_several_updates(self) -> bool:
        """Whether optimizers update more than once in all, so that a failure can come between."""
        return len(self.optimizers) > 1 or any(n > 1 for n in self._most_updates.values())

    def num_updates(self, optimizer: Any) -> int:
        return self._updates[id(optimizer)]

    @property
    def has_updates(self) -> bool:
        return any(map(self.num_updates, self.optimizers))

    @property
    def is_updated(self) -> bool:
        """Whether every optimizer has made as many updates as in an earlier update, at least one.

        The steps then count, even if the loop raises.
        """
        if self.updating is not None or not self.optimizers:
            return False
        usual = {id(each): self._most_updates[id(each)] or 1 for each in self.optimizers}
        return all(self._updates[key] >= count for key, count in usual.items())

    def begin_update(self, optimizer: Any) -> None:
        self.check_warm_up()
        self.updating = optimizer

    def check_warm_up(self) -> None:
        if self.is_warm_up:
            raise WarmedUp

    def end_update(self, optimizer: Any) -> None:
        self.updating = None
        if not self.has_earlier_losses:  # the losses of another optimizer may have another count
            self._is_weighted = False
        if self.is_open:
            self._updates[id(optimizer)] += 1

    def check_whole(self, global_step: int) -> None:
        """Raise RuntimeError if a failed step left an inconsistent state that was not replaced."""
        if self.is_partial:
            raise RuntimeError(
                f"The step after step {global_step} failed after it had changed some parameters: "
                "an optimizer raised within its step, or train_batch changed them itself. They "
                "cannot be restored. Load a checkpoint to continue: trainer.load(path)."
            )

    def commit(self) -> None:
        """Make the steps of this update count."""
        self._most_updates |= self._updates
        self._reset()

    def roll_back(self) -> None:
        self._reset()

    # ---- the weights of losses

    def weigh(
        self,
        count: float | None,
        num_workers: int = 1,
        add_up: Callable[[float], float] = lambda number: number,
    ) -> tuple[float, float]:
        """Return the factor for the gradients of earlier micro-batches, and the weight of a loss.

        An update uses the mean over all items of all workers: add up sums, and divide once::

            sum of (items of the micro-batch * gradient of its mean loss) / total

        `num_workers` workers average their gradients. Therefore a loss has the weight ``items *
        num_workers / total``. Until the last micro-batch, the planned number replaces the total::

            a loss that is a mean    items             planned            total
            with a `count`           count             previous, rounded  sum of all workers
            of samples               samples           all samples        all samples
            of unknown samples       part of a batch   steps * workers    own items * workers
            of repeated samples      0                 the same           the same

        A sum has the weight `num_workers`. A micro-batch without a loss has no items. The first
        loss of the last micro-batch corrects earlier gradients by ``planned / total``. `add_up`
        adds counts over the workers, once per update, and once more in the first update of a
        generation. If workers do not know the partition, the default ``train_batch`` passes the
        samples as `count`.

        Raises:
            ValueError: If another loss of the micro-batch has another count, or if user code
                counts items only for some batches of an update.
        """
        is_repeated, is_first = not self.micro_batch.weight, not self._is_weighted
        self.has_loss = True
        if self.is_sum:
            return 1.0, 0.0 if is_repeated else float(num_workers)
        correction = 1.0
        if is_first or not self.is_open:
            self._add_items(count, is_repeated)
            # An update of one micro-batch needs no plan.
            planned = self._planned(num_workers, add_up) if not self.is_only else 0.0
            self._total = self._exact(num_workers, add_up) if self.is_last else planned
            if self.has_earlier_losses and self._total:
                is_planned = math.isclose(self._total, planned, rel_tol=1e-12)  # up to rounding
                correction = 1.0 if is_planned else planned / self._total
        elif count is not None and count != self._count:
            raise ValueError(
                f"backward(num_samples={count!r}) follows num_samples={self._count} for another "
                "loss of the same batch. Pass the same number."
            )
        return correction, self._items * num_workers / self._total if self._items else 0.0

    def _add_items(self, count: float | None, is_repeated: bool) -> None:
        if self.has_earlier_losses and self._counts_items != (count is not None):
            raise ValueError(
                "backward(num_samples=...) was passed for some batches of an accumulation "
                "group. Pass it for all of them or for none."
            )
        self._count, self._counts_items = count, count is not None
        if count is None:  # parts of a batch of unknown size have fractions of it
            samples = self.micro_batch.samples
            count = self.micro_batch.weight if samples is None else samples
        self._items = 0.0 if is_repeated else float(count)
        self._num_items = self._items + (self._num_items if self.has_earlier_losses else 0.0)
        self._is_weighted = True

    def _planned(self, num_workers: int, add_up: Callable[[float], float]) -> float:
        """Return the planned number of items of all workers, which is equal on all workers."""
        if self._counts_items:
            if self.reference is None:  # the first update of a generation
                self.reference = _power_of_two(self.num_planned * add_up(self._items))
            return self.reference
        if self.plan.total is None:
            return float(self.plan.num_steps * num_workers)
        return self.plan.total if num_workers > 1 else self.plan.samples

    def _exact(self, num_workers: int, add_up: Callable[[float], float]) -> float:
        """Return the number of items of all workers in the update."""
        if self._counts_items:
            total = add_up(self._num_items)
            self.reference = _power_of_two(total)
            return total
        if num_workers == 1 or self.plan.total is None:
            # The sizes on other workers are unknown, so the mean of each worker weighs the same.
            return self._num_items * num_workers
        # If this worker has no loss for some samples, its other samples take over their weight. The
        # total then depends on the rank, because the exact one needs communication.
        own = self.plan.samples
        return self.plan.total * (self._num_items / own if own else 1.0)


def _power_of_two(number: float) -> float:
    """Return a power of two near a number. To multiply by it does not round."""
    return 2.0 ** round(math.log2(number)) if number else 1.0
