"""The interface of the features that take part in each training step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raysgd.data.partition import MicroBatch

if TYPE_CHECKING:
    from raysgd.loop.train_state import TrainState


class StepFeature:
    """The base class of training features. By default, each hook does nothing.

    A `TrainState` calls its features in order. `raysgd.loop.loop` shows the hooks of a step.
    """

    needs_helper: str = ""  # what requires ``optimizer_step`` instead of ``optimizer.step``
    needs_warm_up = False  # the first batch of a worker takes much longer than the others
    samples_per_s = 0.0  # speed of this worker; 0 if unknown
    replicates = False  # keeps the models equal on all workers
    repaired: tuple[Any, ...] = ()  # step, ranks, and cause of the newest repair of replicas

    # ---- the group of workers

    def start_together(self) -> None:
        """Copy the registered objects of rank 0 to all ranks. Every rank must call this."""

    def enter(self) -> None:
        """Prepare for a new generation and its process group."""

    def receive(self, leader: int) -> Callable[[], None]:
        """Receive state of rank `leader` that the training state lacks. Every rank must call this.

        Return a function that loads the received state. Only ranks that follow the leader call it.
        """
        return lambda: None

    def export_replica(self) -> Any:
        """Return the state that the remaining workers need, before this worker leaves."""

    def import_replica(self, replica: Any) -> None:
        """Store the replica of another worker until the next generation."""

    def sync_buffers(self) -> None:
        """Make buffers equal on all ranks after a call."""

    # ---- calls and steps

    def begin_call(self, logs_steps: bool) -> None:
        """Prepare for a call of ``train``, which may log metrics of single steps."""

    def step_metrics(self) -> Mapping[str, float]:
        """Return additional metrics of the newest step."""
        return {}

    def check_trained(self) -> None:
        """Raise an error if user code trains parameters that the workers do not keep equal."""

    def begin_batch(self, place: MicroBatch) -> None:
        """Prepare for a batch, or a part of a batch. A step begins at `place.position` 0."""

    def before_update(self, optimizer: Any) -> None:
        """Read or change the gradients of an optimizer before its update."""

    def after_update(self, optimizer: Any) -> None:
        """Handle the end of an update, or an update that was skipped because of an overflow."""

    def before_commit(self) -> None:
        """Raise an error if the step must not be committed."""

    def commit(self) -> None:
        """Keep the changes of a step. The step counts even if this raises."""

    def roll_back(self) -> None:
        """Restore what a discarded step changed. The loop also calls this if no step is open."""

    def evaluating(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for evaluating the models."""
        return contextlib.nullcontext()

    def applying(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for a function of ``apply_all_operators``."""
        return contextlib.nullcontext()

    def end_epoch(self, epoch: int) -> None:
        """Handle the end of an epoch, after which `epoch` epochs are complete."""

    # ---- state

    def settable(self) -> Any:
        """Return the values that user code may change between steps, for comparison."""

    def state_dict(self) -> dict[str, Any]:
        """Return the entries that this feature adds to the training state."""
        return {}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if this feature cannot load its part of a training state."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this feature's part of a training state, after the models and optimizers."""


class ShardedFeature(StepFeature):
    """Shards the state of an optimizer over the workers, so that no worker has all of it."""

    optimizer: Any
    is_fully_sharded = False  # models are sharded too
    lacks_shards = False  # every worker that held some shard was lost
    ranks_in_sync = True  # all shards belong to the last committed step

    def shards(self) -> list[Any]:
        """Return this worker's shard of the optimizer's state."""
        return []

    def model_shards(self) -> list[Any]:
        """Return this worker's shard of each sharded model."""
        return []

    def without_shards(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the part of a training state that all workers load."""
        return state

    def load_shards(self, state: Mapping[str, Any]) -> None:
        """Load this worker's shards from a training state, after its other parts."""


class IndivisibleError(BaseException):
    """Raised in a part of a batch that must not be split. The loop repeats the step unsplit.

    It does not derive from Exception, so that user code does not catch it.
    """


class MicroBatches(StepFeature):
    """Decides whether batches may be split into parts, and splits them if memory ran out.

    Parts are equivalent to the whole batch if user code computes all gradients before the update,
    and uses the helpers of raysgd for gradients and updates.
    """

    def __init__(self, train_state: TrainState) -> None:
        self._train_state = train_state
        self.why_not: str | None = None  # why batches must not be split
        self.in_use = False  # the loop takes large batches in parts
        self.split = 1  # parts of each batch; more than 1 after memory ran out

    def refuse(self, why: str, place: MicroBatch) -> None:
        """Record why batches must not be split. Raise IndivisibleError if this batch is split."""
        self.why_not = self.why_not or why
        if place.is_part:
            raise IndivisibleError(why)

    def begin_batch(self, place: MicroBatch) -> None:
        """Warn if a batch cannot be split and is larger because workers are missing."""
        if place.is_large:
            self._train_state.say(
                "indivisible",
                "With %d of %d workers, each batch has more samples than its loader's batch size, "
                "and needs more memory. It cannot be split: %s.",
                self._train_state.context.world_size,
                self._train_state.settings.options.num_workers,
                self.why_not or "only the default train_epoch takes batches in parts",
            )

    def split_batch(self, batch: Any, place: MicroBatch) -> Sequence[tuple[Any, MicroBatch]]:
        """Return the parts of a batch with their roles. By default, this is the whole batch."""
        return [(batch, place)]

    def split_after(self, error: BaseException, batch: Any) -> int:
        """Return the number of parts to use after an error in a step, or 0 to raise the error."""
        return 0

    def raise_split(self, factor: int) -> None:
        """Use at least `factor` parts. All ranks must call this at the same step."""

    def explain(self, error: BaseException) -> None:
        """Add advice to an error of a step."""

    def is_tolerable(self, error: BaseException) -> bool:
        """Return whether training can continue after an error, because only memory ran out."""
        return False
