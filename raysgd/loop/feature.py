"""The interface of what takes part in each training step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from raysgd.data.partition import MicroBatch

__all__ = ["ShardedFeature", "StepFeature"]


class StepFeature:
    """A feature of training in one file. By default each hook does nothing.

    A `TrainState` has a list of features and calls them in its order. `raysgd.loop.loop` shows the
    hooks of a step.
    """

    needs_helper: str = ""
    """Why optimizers must be stepped by ``optimizer_step``. Empty if that is not necessary."""

    @property
    def needs_warm_up(self) -> bool:
        """Whether the first batch of a worker takes much longer than the others."""
        return False

    @property
    def is_compiling(self) -> bool:
        """Whether a model is being compiled, most likely."""
        return False

    @property
    def num_skipped(self) -> int | None:
        """Number of updates skipped so far, because gradients overflowed. None: it skips none."""
        return None

    @property
    def replicates(self) -> bool:
        """Whether it keeps the models equal on all workers."""
        return False

    # ---- the group of workers

    def start_together(self) -> None:
        """Take over what rank 0 has registered, when training begins. Every rank calls it."""

    def enter(self) -> None:
        """Prepare for the process group of a new generation."""

    def receive(self, leader: int) -> Callable[[], None]:
        """Receive from rank `leader` what no training state contains. Every rank calls it.

        Returns:
            Applies what was received. Only ranks that follow the leader call it.
        """
        return _do_nothing

    def export_replica(self) -> Any:
        """Return what a worker that stays needs from this one, which leaves."""

    def import_replica(self, replica: Any) -> None:
        """Hold what another worker exported, until the next generation."""

    def sync_buffers(self) -> None:
        """Make buffers, which are not trained and may differ, equal on all ranks after a call."""

    # ---- calls and steps

    def begin_call(self, logs_steps: bool) -> None:
        """Prepare for a call of ``train``, which may log metrics of single steps."""

    def step_metrics(self) -> Mapping[str, float]:
        """Return further metrics of the newest step, for the log of steps."""
        return {}

    def check_trained(self) -> None:
        """Raise an error if user code trains parameters that the workers do not keep equal."""

    def begin_batch(self, place: MicroBatch) -> None:
        """Prepare for a batch, or a part of one: the first of a step has the position 0."""

    def before_update(self, optimizer: Any) -> None:
        """Use the gradients of an optimizer, before ``optimizer_step`` updates parameters."""

    def after_update(self, optimizer: Any) -> None:
        """Note that an optimizer has made an update, or skipped it because of an overflow."""

    def before_commit(self) -> None:
        """Raise an error if the step must not count."""

    def commit(self) -> None:
        """Keep what a step changed. It counts already, also if this raises."""

    def roll_back(self) -> None:
        """Restore what a discarded step changed. Also called if no step is open."""

    def evaluating(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the models are evaluated."""
        return contextlib.nullcontext()

    def end_segment(self) -> None:
        """Report what was found, at the end of a segment or of a validation."""

    def end_epoch(self, epoch: int) -> None:
        """Do what is due after so many completed epochs."""

    # ---- state

    def settable(self) -> Any:
        """Return what user code may set between steps, to compare it."""

    def state_dict(self) -> dict[str, Any]:
        """Return what this feature adds to the training state, by its keys there."""
        return {}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if this feature cannot load its part of a training state."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load its part of a training state, after models and optimizers have loaded theirs."""


class ShardedFeature(StepFeature):
    """Divides the state of an optimizer over the workers, so that no worker has all of it."""

    optimizer: Any
    is_fully_sharded = False
    """Whether models are divided as well."""
    lacks_shards = False
    """Whether shards were lost with all workers that had them."""
    ranks_in_sync = True
    """Whether all shards are of the last committed step."""

    def shards(self) -> list[Any]:
        """Return this worker's shard of the optimizer's state."""
        return []

    def model_shards(self) -> list[Any]:
        """Return this worker's shard of each divided model."""
        return []

    def without_shards(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what all workers load of a training state that is not divided."""
        return state

    def load_shards(self, state: Mapping[str, Any]) -> None:
        """Take this worker's shards from a training state, whose other parts are loaded."""


def _do_nothing() -> None:
    pass
