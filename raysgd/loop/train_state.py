"""The training state of an operator on one worker, for all frameworks."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from raysgd._internal.context import WorkerContext
from raysgd._internal.step_timing import new_timing
from raysgd._internal.timers import TimerCollection
from raysgd.data.partition import MicroBatch
from raysgd.loop.feature import ShardedFeature, StepFeature
from raysgd.loop.micro_batching import MicroBatching
from raysgd.loop.options import Settings
from raysgd.loop.sources import DataSources
from raysgd.loop.transaction import UpdateTransaction
from raysgd.metrics import AverageMeterCollection

_Feature = TypeVar("_Feature", bound=StepFeature)


class SavedState(ABC):
    """What checkpoints, snapshots, and new workers get."""

    @abstractmethod
    def user_settings(self) -> Any:
        """Return values that user code may set between steps, such as learning rates."""

    def flags(self) -> Any:
        """Return what user code may set on models and no state dict has, for new workers."""
        return None

    def set_flags(self, flags: Any) -> None:  # noqa: B027
        """Apply the result of `flags`."""

    @abstractmethod
    def training_state(self) -> dict[str, Any]:
        """Return models, optimizers, and the state of features. Tensors stay on their device."""

    @abstractmethod
    def check_training_state(self, state: dict[str, Any]) -> None:
        """Raise CheckpointError if a state does not fit the registered objects."""

    @abstractmethod
    def load_training_state(self, state: dict[str, Any]) -> None:
        """Load the result of `training_state`."""

    def places_of(
        self, state: dict[str, Any], addresses: set[int]
    ) -> tuple[dict[str, Any], dict[int, Any]]:
        """Replace arrays at `addresses` in a state by equal ones of the training state.

        Also return where to write the content of these arrays.
        """
        return state, {}

    @abstractmethod
    def copy_leaf(self, leaf: Any, on_host: bool = False) -> Any:
        """Return a copy of a leaf of a state, on its device or in the memory of the host."""

    @abstractmethod
    def to_cpu(self, state: Any) -> Any:
        """Return a state on the CPU. It is a copy, unless pickling copies it anyway."""


class TrainState(SavedState):
    """Models, optimizers, and the position in the data. Features add the rest of an update."""

    data: DataSources
    accumulation_steps = 1

    def __init__(self, settings: Settings, seed: int) -> None:
        self.settings = settings
        self.timers = TimerCollection()
        self.timers.enabled = False
        self.timing = new_timing()
        self.models: list[Any] = []
        self.num_criteria = 0
        """Number of criteria with trained parameters, which are the last of `models`."""
        self.optimizers: list[Any] = []
        self.registered = False
        self.is_new = False  # joins the group, and does not have its state yet
        self.epoch = self.offset = self.validation_offset = self.global_step = 0
        # Global steps that user code set. Each key is the number of committed steps then.
        self.steps_of_user: dict[int, int] = {}
        self.seed = seed
        self.transaction = UpdateTransaction()
        self.micro_batching = MicroBatching(settings)
        self.features: list[StepFeature] = [self.micro_batching]
        self._known: list[StepFeature] = []  # the features for which `_with` holds
        self._with: dict[str, list[StepFeature]] = {}  # the features that override a hook
        self.meters: AverageMeterCollection | None = None
        self.gathers_metrics = False  # each worker collects the metrics of all workers
        self.modes: list[tuple[Any, bool]] = []
        """Modules with their modes before the first evaluation since training."""
        self.segment: Any = None
        """The `StepIterator` of the segment in progress, or None."""

    @property
    def context(self) -> WorkerContext:
        return self.settings.context

    @property
    def given_models(self) -> list[Any]:
        """The models that the user registered as models, without criteria."""
        return self.models[: len(self.models) - self.num_criteria]

    def feature(self, kind: type[_Feature]) -> _Feature | None:
        """Return the feature of a class, if the operator has one."""
        return next((each for each in self.features if isinstance(each, kind)), None)

    def features_with(self, hook: str) -> list[StepFeature]:
        """Return the features whose classes override a hook. Most hooks of a step do nothing."""
        if self._known != self.features:
            self._known, self._with = [*self.features], {}
        if hook not in self._with:
            default = getattr(StepFeature, hook)
            self._with[hook] = [f for f in self.features if getattr(type(f), hook) is not default]
        return self._with[hook]

    # ---- position

    def position(self) -> dict[str, Any]:
        position: dict[str, Any] = {
            "epoch": self.epoch,
            "offset": self.offset,
            "validation_offset": self.validation_offset,
            "seed": self.seed,
        }
        if (global_batch := self.data.current.global_batch) is not None:
            position["global_batch"] = global_batch
        if own := self.data.own_seeds():
            position["loader_seeds"] = own
        if self.micro_batching.split > 1:
            position["split"] = self.micro_batching.split
        if self.data.trains_on != "train":
            position["trains_on"] = self.data.trains_on
        if stream := self.data.current.position(self.epoch, self.offset):
            position["stream"] = stream
        return position

    def move_to(self, position: dict[str, Any], global_step: int) -> None:
        self.epoch, self.offset = position["epoch"], position["offset"]
        self.validation_offset = position.get("validation_offset", 0)
        self.data.trains_on = position.get("trains_on", "train")
        self.micro_batching.split = position.get("split", 1)
        self.global_step = global_step
        self.reseed(position.get("seed", self.seed), position.get("loader_seeds", {}))
        self.data.current.move_to(position.get("stream", {}))

    def reseed(self, seed: int, loader_seeds: Mapping[str, int] | None = None) -> None:
        self.seed = seed
        self.data.reseed(seed, loader_seeds or {})

    # ---- steps

    def begin_micro_batch(self, micro_batch: MicroBatch, is_last: bool) -> None:
        """Begin a micro-batch, and an update with its first micro-batch."""
        tx = self.transaction
        tx.begin_micro_batch(micro_batch, is_last)
        if tx.index == 0:
            for feature in self.features_with("begin"):
                feature.begin(tx)
        for feature in self.features_with("begin_micro_batch"):
            feature.begin_micro_batch(tx)

    def commit(self, num_steps: int = 1) -> None:
        tx = self.transaction
        tx.begin_commit()
        for feature in self.features_with("before_commit"):
            feature.before_commit(tx)
        tx.commit()
        self.global_step += num_steps
        try:
            for feature in self.features_with("commit"):
                feature.commit(tx)
        finally:
            tx.reset()
            if self.meters is not None:
                self.meters.count_held()

    def roll_back(self) -> None:
        for feature in self.features:
            feature.roll_back(self.transaction)
        self.transaction.reset()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for feature in self.features:
                stack.enter_context(feature.evaluating())
            try:
                yield
            except Exception as error:
                if self.micro_batching.is_tolerable(error):
                    error.add_note(
                        "Batches are only split in training. Give this loader a smaller batch_size."
                    )
                raise

    def resume_modes(self) -> None:
        """Set the train or eval modes that the models had before an evaluation."""
        for module, training in self.modes:
            module.training = training
        self.modes = []

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Return a context that restores the models at its end."""
        yield

    # ---- the other workers

    def num_rows(self, batch: Any) -> int:
        """Return the first dimension of all tensors in a batch, or 0 if it is not clear."""
        return 0

    @abstractmethod
    def minimum(self, value: int) -> int:
        """Return the smallest `value` of all ranks. Every rank must call it."""

    @abstractmethod
    def from_rank(self, make: Callable[[], Any], rank: int) -> Any:
        """Call `make` on `rank`, and return its result on all ranks. Every rank must call this."""

    def enter(self, context: WorkerContext, config_batch: int | None) -> None:
        self.is_new = self.is_new or self.context.alone
        self.settings.context = context
        self.settings.config_batch = config_batch
        self.transaction.weights.expected = None  # new workers must use the same number
        self.data.enter()
        for feature in self.features:
            feature.enter()

    @abstractmethod
    def copy_training_state(self, leader: int, follows: bool) -> None:
        """Load the state of rank `leader` if this rank `follows`. Every rank must call it."""

    @property
    def replicated(self) -> bool:
        return any(feature.replicates for feature in self.features)

    @property
    def sharded_features(self) -> list[ShardedFeature]:
        """Features that shard the state. If there are any, no worker has all of it."""
        return [each for each in self.features if isinstance(each, ShardedFeature)]

    @property
    def ranks_in_sync(self) -> bool:
        return all(feature.ranks_in_sync for feature in self.sharded_features)
