"""One update of the optimizers: its micro-batches, its losses, and its end.

A step is one batch of the loader on each worker; `global_step` counts steps. An update has one
step, or several with gradient accumulation. A step has several micro-batches if its batch is split,
or with equal bits.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from typing import Any

from raysgd.data.partition import MicroBatch, UpdatePlan
from raysgd.loop.loss_weights import LossWeights


class WarmedUp(BaseException):
    """Raised when a warm-up has computed its gradients. User code must not catch it."""


class Phase(enum.Enum):
    """Where an update is. `UpdateTransaction.counts` decides what follows an error."""

    CLOSED = enum.auto()  # no update is in progress
    OPEN = enum.auto()  # it has batches
    COMMITTING = enum.auto()  # features may refuse it
    COMMITTED = enum.auto()  # its steps count, and features keep its changes


class UpdateTransaction:
    """The update in progress on this worker, up to its commit or roll-back.

    The loop begins each micro-batch, and passes the transaction to the hooks of all features. The
    docstring of `raysgd.loop.loop` shows the life of an update. Without a loop, each batch is one.
    Each worker has one object, and `reset` prepares it for the next update.
    """

    new_weights = LossWeights

    def __init__(self) -> None:
        self.optimizers: Sequence[Any] = ()
        self.is_warm_up = False  # the update ends before an optimizer updates
        self.is_partial = False  # an update or a load left changes that no feature could restore
        self.weights = self.new_weights(self)
        self._most_steps: Counter[int] = Counter()
        self.reset()

    def reset(self) -> None:
        """Forget the update, so that the next one can begin."""
        self.phase = Phase.CLOSED
        self.stepping: Any = None  # the optimizer whose step runs
        self.in_helper = False  # the optimizer's step runs within ``optimizer_step``
        # Batches of the loader, to train them again. None: the source can read the batch again.
        self.drawn: list[Any] = []
        self.plan = UpdatePlan()
        self.num_planned = 1  # micro-batches of the update
        self.is_split = False  # batches are trained in parts
        self.index = -1  # of the current micro-batch; -1 before the first
        self._optimizer_steps: Counter[int] = Counter()
        self.weights.reset()
        self._set(MicroBatch(), is_last=True)

    def _set(self, micro_batch: MicroBatch, is_last: bool) -> None:
        self.micro_batch, self.is_last = micro_batch, is_last
        self.requested: set[int] = set()  # optimizers whose step was requested in this micro-batch

    # ---- the life of an update

    def draw(self, batch: Any) -> None:
        """Add a batch of the loader, and open a new update if none is open."""
        self.phase = Phase.OPEN
        self.drawn.append(batch)

    def begin_plan(self, plan: UpdatePlan) -> None:
        """Set the micro-batches of the update, before the first one begins."""
        self.plan, self.num_planned = plan, len(plan.batches)
        self.is_split = self.num_planned > plan.num_steps

    def split(self, num_parts: int) -> None:
        """Record that each planned micro-batch is trained in `num_parts` parts."""
        if num_parts > 1:
            self.is_split, self.num_planned = True, len(self.plan.batches) * num_parts

    def begin_micro_batch(self, micro_batch: MicroBatch, is_last: bool = True) -> None:
        """Begin a micro-batch. The update follows directly if it `is_last`."""
        self.phase = Phase.OPEN
        self.index += 1
        self._set(micro_batch, is_last)
        self.weights.begin_micro_batch()

    @property
    def is_open(self) -> bool:
        """Whether the update has batches, and was neither committed nor undone."""
        return self.phase in (Phase.OPEN, Phase.COMMITTING)

    @property
    def is_only(self) -> bool:
        """Whether the update has only this micro-batch."""
        return self.index <= 0 and self.is_last

    @property
    def has_several_optimizer_steps(self) -> bool:
        """Whether optimizers make several steps in all, so that a failure can come between."""
        return len(self.optimizers) > 1 or any(n > 1 for n in self._most_steps.values())

    def num_optimizer_steps(self, optimizer: Any) -> int:
        return self._optimizer_steps[id(optimizer)]

    @property
    def has_optimizer_steps(self) -> bool:
        return any(map(self.num_optimizer_steps, self.optimizers))

    @property
    def is_updated(self) -> bool:
        """Whether every optimizer has made the most steps of an earlier update, at least one.

        The steps then count, even if the loop raises.
        """
        if self.stepping is not None or not self.optimizers:
            return False
        usual = {id(each): self._most_steps[id(each)] or 1 for each in self.optimizers}
        return all(self._optimizer_steps[key] >= count for key, count in usual.items())

    def begin_optimizer_step(self, optimizer: Any) -> None:
        self.check_warm_up()
        self.stepping = optimizer

    def check_warm_up(self) -> None:
        if self.is_warm_up:
            raise WarmedUp

    def end_optimizer_step(self, optimizer: Any) -> None:
        self.stepping = None
        self.weights.end_optimizer_step()
        if self.is_open:
            self._optimizer_steps[id(optimizer)] += 1

    def check_whole(self, global_step: int) -> None:
        """Raise RuntimeError if a failed step left an inconsistent state that was not replaced."""
        if self.is_partial:
            raise RuntimeError(
                f"The step after step {global_step} failed after it had changed some parameters: "
                "an optimizer raised within its step, or train_batch changed them itself. They "
                "cannot be restored. Load a checkpoint to continue: trainer.load(path)."
            )

    def counts(self, raised: bool = False) -> bool:
        """Return whether the update counts on this worker, if the loop now ends it.

        ==================================  =============  =============  =============
        the loop ...                        asks for more  returns        has `raised`
        ==================================  =============  =============  =============
        before the last micro-batch         it continues   an error       it is undone
        in the last micro-batch             it is counted  it is counted  it is undone
        there, after `is_updated`           it is counted  it is counted  it is counted
        after a feature has refused it      -              -              it is undone
        ==================================  =============  =============  =============
        """
        return self.phase is Phase.OPEN and self.is_last and (not raised or self.is_updated)

    def begin_commit(self) -> None:
        """Ask the features, which refuse the update by an error."""
        self.phase = Phase.COMMITTING

    def commit(self) -> None:
        """Make the steps of this update count. `reset` follows, after the hooks of features."""
        self._most_steps |= self._optimizer_steps
        self.phase = Phase.COMMITTED
