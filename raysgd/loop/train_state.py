"""The training state of an operator on one worker, and its random number generators."""

import contextlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raysgd._internal.collectives import Collectives
from raysgd._internal.forwarding import forward_to
from raysgd._internal.nested import map_leaves, preserving_attributes
from raysgd._internal.runner import WorkerContext
from raysgd._internal.step_timing import StepTiming
from raysgd._internal.timers import TimerCollection
from raysgd._internal.worker_status import StateStatus
from raysgd.data.partition import MicroBatchPlan
from raysgd.errors import CheckpointError
from raysgd.loop.feature import UPDATE_HOOKS, UpdateFeature
from raysgd.loop.micro_batching import MicroBatching
from raysgd.loop.options import WorkerSettings
from raysgd.loop.sources import DataSources
from raysgd.loop.state_placement import StatePlacement
from raysgd.loop.update import BadStepRecord, MicroBatchMetrics, Update
from raysgd.metrics import AverageMeterCollection


@dataclass
class Position:
    """How far training is. Commits, ends of epochs, evaluations, and loaded states change it."""

    epoch: int = 0
    offset: int = 0
    validation_offset: int = 0
    global_step: int = 0


@dataclass
class WorkerCall:
    """State of a call on a worker. A worker that joins the call receives it."""

    call_number: int = -1
    start_step: int = 0  # of an earlier call while its steps are replayed
    scheduler_call: int = -1  # the newest call that stepped the schedulers with a metric
    last_log_step: int = 0  # step of the newest point
    keeps_modes: bool = False  # train or eval modes stay, because the newest segment has paused
    ended_early: bool = False  # before its goal, because a loss was not finite
    extra_epochs: int = 0  # in addition to the goal, because the call began at the end of an epoch
    merged_metrics: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    """Start step and metrics of all workers, for segments that merge them. Rank 0 returns them."""


class RandomGenerators:
    """The random number generators of Python and NumPy. Subclasses add framework generators."""

    def state(self) -> dict[str, Any]:
        numpy_state: Any = np.random.get_state(legacy=True)
        return {"python": random.getstate(), "numpy": numpy_state}

    def set(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state`. Accept other sequences in place of tuples and arrays."""
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
        kind, keys, position, *rest = state["numpy"]
        if not 0 <= position <= len(keys):  # NumPy would read beyond the keys
            raise ValueError(f"NumPy generator: position {position} must be from 0 to {len(keys)}.")
        np.random.set_state((kind, np.asarray(keys, np.uint32), position, *rest))

    def loadable_states(self, states: Any, num_workers: int) -> Sequence[Mapping[str, Any]]:
        """Return checked states of all workers, or () if the number of workers has changed."""
        try:
            with self.preserving_state():
                for state in states:
                    self.set(state)
        except Exception as error:
            raise CheckpointError(
                f"The state's data['rng'] cannot be loaded: {error!r}. It must have the random "
                "number generators of each worker."
            ) from error
        return states if len(states) == num_workers else ()

    @contextlib.contextmanager
    def preserving_state(self) -> Iterator[None]:
        before = self.state()
        try:
            yield
        finally:
            self.set(before)


class TrainState(ABC):
    """The position in the data, the update in progress, and the features that take part in it."""

    data: DataSources
    collectives: Collectives
    generators: RandomGenerators
    micro_batching: MicroBatching
    # What `register` sets, and the loop reads.
    num_trained_criteria = 0  # with trained parameters, which are the last of `models`
    accumulation_steps: int = 1
    placement: StatePlacement = StatePlacement()
    is_registered = False
    # What a trial reads and changes: the options of optimizers, which its config sets.
    initial_hyperparameters: Callable[[], Any]
    rescale_hyperparameters: Callable[[Any, Any], None]

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.timers = TimerCollection()
        self.timers.enabled = False
        self.step_timing = StepTiming()
        self.read_speed: Callable[[], float] = float
        """Returns the samples per second of this worker; 0 if unknown. Another thread calls it."""
        self.lacks_state = False  # joins the group, and does not have its state yet
        self.is_damaged = False  # an update or a load left changes that no feature could restore
        self.position = Position()
        self.call = WorkerCall()  # the newest one
        # Of the segment in progress. The next segment resets them.
        self.segment: Any = None  # a Segment; None between them
        # Committed steps when user code set the global step, and the value that it set.
        self.user_set_step: tuple[int, int] | None = None
        self.meters: AverageMeterCollection | None = None
        """Metrics of the epoch or the validation in progress. None in loops of user code."""
        self.bad_steps: list[BadStepRecord] = []  # updates that were not applied, oldest first
        self.gradient_norms: dict[int, Any] = {}  # of the newest update, by ID of the optimizer
        self.models: list[Any] = []  # that are registered, like the next
        self.optimizers: list[Any] = []
        self.update = Update()
        self.features: list[UpdateFeature] = []
        self.features_by_hook: dict[str, list[UpdateFeature]] = {}
        """The features that override a hook of updates, by its name."""
        self.set_features(())
        self.saved_modes: list[tuple[Any, bool]] = []
        """Modules with their train or eval modes before the first evaluation since training."""

    context: WorkerContext = forward_to("settings.context", "Rank and resources of this worker.")

    def set_features(self, features: Sequence[UpdateFeature]) -> None:
        """Set the features in the order of their hooks. Most features override few hooks."""
        self.features[:] = features
        for name in UPDATE_HOOKS:
            hook = getattr(UpdateFeature, name)
            self.features_by_hook[name] = [
                f for f in features if getattr(type(f), name) is not hook
            ]
        counts_in_commit = any(feature.counts_in_commit for feature in features)
        self.update.optimizer_steps.expect(self.optimizers, counts_in_commit)

    @property
    def registered_models(self) -> list[Any]:
        """The models that the user registered as models, without criteria."""
        return self.models[: len(self.models) - self.num_trained_criteria]

    # ---- position

    def position_to_save(self) -> dict[str, Any]:
        own, names = self.position, ("epoch", "offset", "validation_offset")
        position = {name: getattr(own, name) for name in names} | {"seed": self.data.seed}
        if (global_batch := self.data.training_source.global_batch_size) is not None:
            position["global_batch"] = global_batch
        if loader_seeds := self.data.own_seeds():
            position["loader_seeds"] = loader_seeds
        if max(max_counts := [*self.update.optimizer_steps.max_counts.values()], default=1) > 1:
            position["optimizer_steps"] = max_counts  # when an update is complete
        if self.micro_batching.num_splits > 1:
            position["split"] = self.micro_batching.num_splits
        if self.data.training_source_name != "train":
            position["trains_on"] = self.data.training_source_name
        if resume_info := self.data.training_source.resume_info(own.epoch, own.offset):
            # In older versions, only iterable data had it. The key "stream" stays in checkpoints.
            position["stream"] = resume_info
        return position

    def load_position(self, position: dict[str, Any], global_step: int) -> None:
        own = self.position
        own.epoch, own.offset, own.global_step = position["epoch"], position["offset"], global_step
        own.validation_offset = position.get("validation_offset", 0)
        self.data.training_source_name = position.get("trains_on", "train")
        self.update.optimizer_steps.load_max_counts(position.get("optimizer_steps", ()))
        self.micro_batching.num_splits = position.get("split", 1)
        self.data.reseed(position.get("seed", self.data.seed), position.get("loader_seeds"))
        self.data.training_source.load_resume_info(position.get("stream", {}))

    # ---- steps

    def begin_micro_batch(self, micro_batch: MicroBatchPlan, is_last: bool) -> None:
        """Begin a micro-batch, and an update with its first micro-batch."""
        update = self.update
        update.begin_micro_batch(micro_batch, is_last)
        if update.micro_batch_index == 0:
            for feature in self.features_by_hook["begin_update"]:
                feature.begin_update(update)
        for feature in self.features_by_hook["begin_micro_batch"]:
            feature.begin_micro_batch(update)

    def commit(self, num_steps: int, offset: int) -> None:
        """Commit the update in progress, after which the position is at `offset` of the epoch."""
        update, position = self.update, self.position
        update.begin_commit()
        for feature in self.features_by_hook["before_commit"]:
            feature.before_commit(update)
        update.commit()
        position.global_step, position.offset = position.global_step + num_steps, offset
        self.step_timing.num_steps += num_steps
        errors = []
        for feature in self.features_by_hook["commit"]:
            try:
                feature.commit(update)
            except BaseException as error:  # the update counts for the others, too
                errors.append(error)
        metrics = update.pop_metrics()
        update.close()
        self.add_metrics(metrics)
        if errors:
            raise next((e for e in errors if not isinstance(e, Exception)), errors[0])  # Ctrl-C

    def add_metrics(self, metrics: Sequence[MicroBatchMetrics]) -> None:
        """Add metrics of an update that counts to the meters, if there are any."""
        if self.meters is not None:
            for of_micro_batch in metrics:
                self.meters.update(*of_micro_batch)

    def end_epoch(self) -> None:
        self.position.epoch, self.position.offset = self.position.epoch + 1, 0
        for feature in self.features:
            feature.end_epoch(self.position.epoch)

    def check_undamaged(self) -> None:
        """Raise RuntimeError if a failed step left an inconsistent state that was not replaced."""
        if self.is_damaged:
            raise RuntimeError(
                f"The step after step {self.position.global_step} failed after it had changed some "
                "parameters: an optimizer raised within its step, or train_batch changed them "
                "itself. They cannot be restored. Load a checkpoint to continue: "
                "trainer.load(path)."
            )

    def roll_back(self) -> None:
        for feature in self.features:
            feature.roll_back(self.update)
        self.update.close()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for feature in self.features:
                stack.enter_context(feature.evaluating())
            try:
                yield
            except Exception as error:
                if self.micro_batching.is_recoverable(error):
                    error.add_note(
                        "Batches are only split in training. Give this loader a smaller batch_size."
                    )
                raise

    @abstractmethod
    def copy_leaf(self, leaf: Any, on_host: bool = False, may_alias: bool = False) -> Any:
        """Return a copy of a leaf of a state, on its device or in the memory of the host.

        The copy may share memory with the leaf if it `may_alias`.
        """

    def to_cpu(self, state: Any) -> Any:
        """Return a state on the CPU. It is a copy, unless pickling copies it anyway."""
        alias = not self.context.is_in_driver
        return map_leaves(state, lambda leaf: self.copy_leaf(leaf, on_host=True, may_alias=alias))

    def restore_modes(self) -> None:
        """Set the train or eval modes that the models had before an evaluation."""
        for module, training in self.saved_modes:
            module.training = training
        self.saved_modes = []

    @contextlib.contextmanager
    def preserving_state(self, operator: Any) -> Iterator[None]:
        """Restore the operator, the models, random numbers, and this state at the end."""
        with (
            self.generators.preserving_state(),
            preserving_attributes(operator, [self, *self.features]),
            self.preserving_models(),  # which may find out that this state is damaged
            preserving_attributes(self.position),
            preserving_attributes(self),
        ):
            yield

    @abstractmethod
    def preserving_models(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that restores the models at its end."""

    def can_complete(self, snapshot: Mapping[str, Any]) -> bool:
        """Return whether ``setup`` makes what a snapshot lacks. A control thread calls this."""
        return True

    # ---- the other workers

    def num_rows(self, batch: Any) -> int:
        """Return the first dimension of all tensors in a batch, or 0 if it is not clear."""
        return 0

    def begin_generation(self, context: WorkerContext) -> None:
        context_before, self.settings.context = self.context, context
        self.lacks_state = self.lacks_state or context_before.is_alone
        self.update.loss_weights.begin_generation()
        self.data.repartition()
        for feature in self.features:
            feature.begin_generation()

    @property
    def state_status(self) -> StateStatus:
        """What this worker has of the state. Another thread may read it."""
        state_status = self.placement.state_status
        is_damaged = self.is_damaged and state_status.condition == "good"
        return state_status._replace(condition="damaged") if is_damaged else state_status
