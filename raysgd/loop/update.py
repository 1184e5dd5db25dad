"""One update of the optimizers: its micro-batches, its losses, and its end.

A step is one batch of the loader on each worker; `global_step` counts steps. An update has one
step, or several with gradient accumulation. A step has several micro-batches if its batch is split,
or with equal bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from raysgd.data.partition import MicroBatch, UpdatePlan
from raysgd.loop.loss_weights import LossWeights


class WarmedUp(BaseException):
    """Raised when a warm-up has computed its gradients. User code must not catch it."""


_NO_PLAN, _NO_BATCH = UpdatePlan(), MicroBatch()


class Update:
    """The update in progress on this worker, up to its commit or roll-back.

    The loop begins each micro-batch, and passes the update to the hooks of all features. The
    docstring of `raysgd.loop.loop` shows the life of an update. Without a loop, each batch has its
    own. Each worker has one object, and `reset` prepares it for the next update.
    """

    def __init__(self, has_fixed_parts: bool = False) -> None:
        self.has_fixed_parts = has_fixed_parts
        """Whether workers add up gradients and counts of parts, and average neither. The commit
        gives each worker the metrics of all workers, and the update counts then."""
        self.is_warm_up = False  # the update ends before an optimizer updates
        self.is_damaged = False  # an update or a load left changes that no feature could restore
        self.losses = LossWeights(self)
        self.optimizer_steps = OptimizerSteps(self)
        self.reset()

    def reset(self) -> None:
        """Forget the update, so that the next one can begin."""
        self.is_open = False  # has batches, and was neither committed nor undone
        self.is_committing = False  # features may refuse the update
        # Batches of the loader, to train them again. None: the source can read the batch again.
        self.drawn: list[Any] = []
        self.plan = _NO_PLAN
        self.split = 1  # after memory ran out, planned micro-batches are split too
        self.bad_step: dict[str, Any] | None = None  # why it counts, but nothing is applied
        self.index = -1  # of the current micro-batch; -1 before the first
        self.micro_batch, self.in_last_micro_batch = _NO_BATCH, True
        self.losses.reset()
        self.optimizer_steps.reset()

    # ---- the life of an update

    def begin_micro_batch(self, micro_batch: MicroBatch, is_last: bool = True) -> None:
        """Begin a micro-batch, and open the update. If this `is_last`, the update ends with it."""
        self.is_open, self.is_committing = True, False
        self.index += 1
        self.micro_batch, self.in_last_micro_batch = micro_batch, is_last
        self.optimizer_steps.requested = set()
        self.losses.begin_micro_batch()

    @property
    def num_planned(self) -> int:
        """Number of micro-batches of the update."""
        return len(self.plan.batches) * self.split

    @property
    def is_split(self) -> bool:
        """Whether batches are split into micro-batches."""
        return self.num_planned > self.plan.num_steps

    @property
    def has_one_micro_batch(self) -> bool:
        """Whether the update has only this micro-batch. Always false with fixed parts."""
        return self.index <= 0 and self.in_last_micro_batch and not self.has_fixed_parts

    def should_commit(self, raised: bool = False) -> bool:
        """Return whether the update counts on this worker, if the loop now ends it.

        ========================================  =============  =============  =============
        the loop ...                              asks for more  returns        has `raised`
        ========================================  =============  =============  =============
        before the last micro-batch               it continues   an error       it is undone
        in the last micro-batch                   it is counted  it is counted  it is undone
        there, if `optimizer_steps.are_complete`  it is counted  it is counted  it is counted
        after a feature has refused it            -              -              it is undone
        ========================================  =============  =============  =============
        """
        is_done = self.is_open and not self.is_committing and self.in_last_micro_batch
        return is_done and (not raised or self.optimizer_steps.are_complete)

    def commit(self) -> None:
        """Make the steps of this update count. `reset` follows, after the hooks of features."""
        self.optimizer_steps.commit()
        self.is_open = False


class OptimizerSteps:
    """Counts the steps of optimizers in an update, and knows how many an update usually has."""

    def __init__(self, update: Update) -> None:
        self._update = update
        self.optimizers: Sequence[Any] = ()
        self._max_steps: dict[int, int] = {}  # of an update that counts, by ID of the optimizer
        self.reset()

    def reset(self) -> None:
        self.running: Any = None  # the optimizer whose step runs
        self.in_helper = False  # the optimizer's step runs within ``optimizer_step``
        self.requested: set[int] = set()
        """IDs of the optimizers whose step was requested in this micro-batch."""
        self.done: defaultdict[int, int] = defaultdict(int)
        """Number of steps by the ID of each optimizer that has stepped."""
        self.are_skipped = False  # all of them, for lack of items

    def end(self, optimizer: Any) -> None:
        """End a step of an optimizer, also one that was skipped."""
        update = self._update
        self.running, is_empty = None, update.losses.is_empty
        self.are_skipped = is_empty and (self.are_skipped or not self.done)
        update.losses.end_optimizer_step()
        if update.is_open:
            self.done[id(optimizer)] += 1

    def commit(self) -> None:
        for key, count in self.done.items():
            if count > self._max_steps.get(key, 0):
                self._max_steps[key] = count

    @property
    def are_several(self) -> bool:
        """Whether optimizers make several steps in all, so that a failure can come between."""
        if self._update.has_fixed_parts:
            return True  # a worker can be lost between its step and the commit
        return len(self.optimizers) > 1 or max(self._max_steps.values(), default=0) > 1

    @property
    def are_complete(self) -> bool:
        """Whether every optimizer has made the most steps of an earlier update, at least one.

        The steps then count, even if the loop raises.
        """
        if self._update.has_fixed_parts or self.running is not None or not self.optimizers:
            return False
        usual = {id(each): self._max_steps.get(id(each), 1) for each in self.optimizers}
        return all(self.done.get(key, 0) >= count for key, count in usual.items())

    @property
    def have_ever_counted(self) -> bool:
        """Whether some update that counts had a step of an optimizer."""
        return bool(self._max_steps)
