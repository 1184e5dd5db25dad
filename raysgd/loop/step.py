"""The progress of one training step, and whether a failed step left an inconsistent state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from raysgd.data.partition import MicroBatch


class WarmedUp(BaseException):
    """Raised when a warm-up has computed its gradients. User code must not catch it."""


class Step:
    """The step in progress on this worker. The docstring of `raysgd.loop.loop` shows its life."""

    def __init__(self) -> None:
        self.is_open = False  # has a batch, and was neither committed nor discarded
        # Every optimizer has made its updates. The step then counts, even if the loop raises.
        self.is_updated = False
        self.optimizers: Sequence[Any] = ()
        self.batches: list[Any] = []
        self.place = MicroBatch()  # role of the current batch, or part of one, in the step
        self.updating: Any = None
        self.is_warm_up = False  # the step ends before an optimizer updates
        self.is_partial = False  # a discarded step left changes that no feature could restore
        self._updates: Counter[int] = Counter()
        self._most_updates: Counter[int] = Counter()

    @property
    def has_several_updates(self) -> bool:
        """Whether steps make several updates, so that a step can fail between two updates."""
        return len(self.optimizers) > 1 or any(n > 1 for n in self._most_updates.values())

    def num_updates(self, optimizer: Any) -> int:
        return self._updates[id(optimizer)]

    def draw(self, batch: Any) -> None:
        """Add a batch of the loader, and open a new step if none is open."""
        self.is_open = True
        self.batches.append(batch)

    def run(self, place: MicroBatch) -> None:
        self.is_open, self.place = True, place

    def begin_update(self, optimizer: Any) -> None:
        self.check_warm_up()
        self.updating, self.is_updated = optimizer, False

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
            self.is_updated = True

    def check_whole(self, global_step: int) -> None:
        """Raise RuntimeError if a failed step left an inconsistent state that was not replaced."""
        if self.is_partial:
            raise RuntimeError(
                f"The step after step {global_step} failed after it had changed some parameters: "
                "an optimizer raised within its step, or train_batch changed them itself. They "
                "cannot be restored. Load a checkpoint to continue: trainer.load(path)."
            )

    def commit(self) -> None:
        self._most_updates |= self._updates
        self.discard()

    def discard(self) -> None:
        self.is_open = self.is_updated = False
        self.place, self.batches, self.updating = MicroBatch(), [], None
        self._updates.clear()
