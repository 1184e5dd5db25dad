"""The interface of what takes part in each training step."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from raysgd.data.partition import MicroBatch

__all__ = ["StepFeature"]


class StepFeature:
    """A feature of training in one file. By default each hook does nothing.

    A registration has a list of features and calls them in its order, which a discarded step
    reverses. `raysgd.loop.loop` shows when.
    """

    def begin_batch(self, place: MicroBatch) -> None:
        """Prepare for a batch, or a part of one: the first of a step has the position 0."""

    def commit(self) -> None:
        """Keep what a step changed. It counts already, also if this raises."""

    def roll_back(self) -> None:
        """Restore what a discarded step changed. Also called if no step is open."""

    def evaluating(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the models are evaluated."""
        return contextlib.nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Return what this feature adds to the training state, by its keys there."""
        return {}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if this feature cannot load its part of a training state."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over its part of a training state that the models have loaded."""

    def end_segment(self) -> None:
        """Report what was found, at the end of a segment or of a validation."""

    def end_epoch(self, epoch: int) -> None:
        """Do what is due after so many completed epochs."""
