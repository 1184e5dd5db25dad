"""Batches in parts: whether the code that trains them allows it, and what their parts are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from raysgd.data.partition import MicroBatch
from raysgd.loop.feature import StepFeature

if TYPE_CHECKING:
    from raysgd.loop.train_state import TrainState

__all__ = ["IndivisibleError", "MicroBatches"]


class IndivisibleError(BaseException):
    """Raised within a part of a batch that has to be trained as a whole; the step is redone so.

    It passes through user code, which must not take it for an error.
    """


class MicroBatches(StepFeature):
    """Remembers why batches must not come in parts, and splits them if memory ran out.

    Parts make the update of a whole batch if all gradients come before the update, and both by
    the helpers. That is seen while batches are whole, or in the first part of one.
    """

    def __init__(self, train_state: TrainState) -> None:
        self._train_state = train_state
        self.why_not: str | None = None
        """None: they may."""
        self.in_use = False
        """Whether the loop takes large batches in parts."""
        self.split = 1
        """Parts of each batch in training; more than 1 after memory ran out."""

    def refuse(self, why: str, place: MicroBatch) -> None:
        """Note why they must not.

        Raises:
            IndivisibleError: if the current batch has come in parts.
        """
        self.why_not = self.why_not or why
        if place.is_part:
            raise IndivisibleError(why)

    def begin_batch(self, place: MicroBatch) -> None:
        """Warn of a batch that is larger because workers are missing, and comes as a whole."""
        if place.is_large:
            self._train_state.say(
                "indivisible",
                "With %d of %d workers a batch has more samples than the batch size of its loader, "
                "and comes as a whole, which takes more memory: %s.",
                self._train_state.context.world_size,
                self._train_state.settings.options.num_workers,
                self.why_not or "only the default train_epoch takes it in parts",
            )

    def split_batch(self, batch: Any, place: MicroBatch) -> Sequence[tuple[Any, MicroBatch]]:
        """Return the parts in which to train a batch, with their places: the batch, as a rule."""
        return [(batch, place)]

    def split_after(self, error: BaseException, batch: Any) -> int:
        """Return in how many parts to train batches after an error in a step; 0: it is an error."""
        return 0

    def raise_split(self, factor: int) -> None:
        """Train batches in more parts. Every rank must do so at the same step."""

    def explain(self, error: BaseException) -> None:
        """Add a note to an error of a step if there is advice for it."""

    def is_tolerable(self, error: BaseException) -> bool:
        """Whether training continues without something that there was no memory for."""
        return False
