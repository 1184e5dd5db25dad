"""The state of one training step: whether it counts, and whether it left the state clean."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from typing import Any

from raysgd.data.partition import MicroBatch

__all__ = ["Step", "StepState", "WarmedUp"]


class WarmedUp(BaseException):
    """Raised when a warm-up has computed its gradients. User code must not catch it."""


class StepState(enum.Enum):
    """State of a step. The docstring of `raysgd.loop.loop` shows the transitions."""

    DRAWN = "the loader has given its batch"
    RUNNING = "the loop trains on the batch"
    UPDATED = "every optimizer has made its updates"
    COMMITTED = "it counts"
    DISCARDED = "it does not count, and what it changed was restored"


class Step:
    """The step in progress on this worker, or the last one."""

    def __init__(self) -> None:
        self.state = StepState.COMMITTED
        self.optimizers: Sequence[Any] = ()
        self.batches: list[Any] = []
        self.place = MicroBatch()
        """Role of the current batch, or part of one, in the step."""
        self.updating: Any = None
        self.is_warm_up = False
        """Whether it ends before an optimizer steps."""
        self.is_partial = False
        """Whether a discarded step left changes that no feature could restore."""
        self._updates: Counter[int] = Counter()
        self._most_updates: Counter[int] = Counter()

    @property
    def is_open(self) -> bool:
        return self.state not in (StepState.COMMITTED, StepState.DISCARDED)

    @property
    def is_updated(self) -> bool:
        """Whether to commit the step if the loop raises now."""
        return self.state is StepState.UPDATED

    @property
    def has_several_updates(self) -> bool:
        """Whether steps make several updates, so that a step can fail between them."""
        return len(self.optimizers) > 1 or any(n > 1 for n in self._most_updates.values())

    def num_updates(self, optimizer: Any) -> int:
        return self._updates[id(optimizer)]

    def draw(self, batch: Any) -> None:
        """Record a batch of the loader, and open a new step if none is open."""
        if not self.is_open:
            self.state = StepState.DRAWN
            self._updates.clear()
        self.batches.append(batch)

    def run(self, place: MicroBatch) -> None:
        """Record that the loop received a batch or a part of one."""
        self.place = place
        if self.state is not StepState.UPDATED:
            self.state = StepState.RUNNING

    def begin_update(self, optimizer: Any) -> None:
        """Record that an optimizer is about to change parameters.

        Raises:
            WarmedUp: In a warm-up.
        """
        self.check_warm_up()
        self.updating = optimizer
        if self.state is StepState.UPDATED:
            self.state = StepState.RUNNING

    def check_warm_up(self) -> None:
        if self.is_warm_up:
            raise WarmedUp

    def end_update(self, optimizer: Any) -> None:
        self.updating = None
        if not self.is_open:
            return
        self._updates[id(optimizer)] += 1
        usual = {id(each): self._most_updates[id(each)] or 1 for each in self.optimizers}
        if usual and all(self._updates[key] >= count for key, count in usual.items()):
            self.state = StepState.UPDATED

    def check_whole(self, global_step: int) -> None:
        """Raise RuntimeError if a failed step left an inconsistent state that was not replaced."""
        if self.is_partial:
            raise RuntimeError(
                f"The step after step {global_step} failed when it had changed some "
                "parameters: an optimizer raised within its step, or train_batch moved them "
                "itself. They cannot be restored. Load a checkpoint to continue: "
                "trainer.load(path)."
            )

    def commit(self) -> None:
        self._most_updates |= self._updates
        self._end(StepState.COMMITTED)

    def discard(self) -> None:
        if self.is_open:
            self._end(StepState.DISCARDED)
        self.updating = None

    def _end(self, state: StepState) -> None:
        self.state, self.place, self.batches, self.updating = state, MicroBatch(), [], None
        self._updates.clear()
