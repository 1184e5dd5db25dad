"""The training state of an operator on one worker, for all frameworks."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raysgd._internal.context import WorkerContext
from raysgd._internal.timers import TimerCollection
from raysgd.data.partition import MicroBatch
from raysgd.loop.feature import MicroBatches, ShardedFeature, StepFeature
from raysgd.loop.options import Options
from raysgd.loop.sources import DataSources
from raysgd.loop.step import Step
from raysgd.metrics import AverageMeterCollection

if TYPE_CHECKING:
    from raysgd.loop.step_iterator import StepIterator

logger = logging.getLogger(__name__)


@dataclass
class Settings:
    """The trainer's arguments, and the rank and resources of this worker."""

    options: Options
    context: WorkerContext = field(default_factory=WorkerContext)
    batch_share: int | None = None  # ``config[BATCH_SIZE]`` of the operator
    global_batch: int | None = None  # ``config[BATCH_SIZE]`` of the trainer

    @property
    def full_size(self) -> int | None:
        """Number of workers in the full group if smaller groups keep its batch size, else None."""
        keeps = self.options.elastic.global_batch == "keep"
        return self.options.num_workers if keeps else None

    @property
    def placing(self) -> dict[str, Any]:
        """Arguments with which a source partitions data for the group."""
        full_size = self.full_size
        return {
            "world_size": self.context.world_size,
            "rank": self.context.world_rank,
            "full_size": full_size,
            "global_batch": None if full_size is None else self.global_batch,
        }


class TrainState(ABC):
    """Models, optimizers, and the position in the data. Features add the rest of a step."""

    data: DataSources
    accumulation_steps = 1

    def __init__(self, settings: Settings, seed: int) -> None:
        self.settings = settings
        self.timers = TimerCollection()
        self.timers.enabled = False
        self.models: list[Any] = []
        self.num_criteria = 0
        """Number of criteria with trained parameters, which are the last of `models`."""
        self.optimizers: list[Any] = []
        self.registered = False
        self.epoch = self.offset = self.validation_offset = self.global_step = 0
        # Global steps that user code set. Each key is the number of committed steps then.
        self.counted: dict[int, int] = {}
        self.seed = seed
        self.step = Step()
        self.parts = MicroBatches(self)
        self.features: list[StepFeature] = [self.parts]
        self._logged: set[str] = set()
        self.meters: AverageMeterCollection | None = None
        self.modes: list[tuple[Any, bool]] = []
        """Modules with their modes before the first evaluation since training."""
        self.segment: StepIterator | None = None

    @property
    def context(self) -> WorkerContext:
        return self.settings.context

    @property
    def given_models(self) -> list[Any]:
        """The models that the user registered as models, without criteria."""
        return self.models[: len(self.models) - self.num_criteria]

    def feature(self, name: str) -> Any:
        """Return the feature whose class has this name, or None."""
        found = (each for each in self.features if type(each).__name__ == name)
        return next(found, None)

    def say(self, key: str, message: str, *values: Any, anywhere: bool = False) -> None:
        """Log a warning, once for each `key`, on rank 0 or `anywhere`."""
        if (anywhere or self.context.world_rank == 0) and key not in self._logged:
            self._logged.add(key)
            logger.warning(message, *values)

    # ---- position

    def position(self) -> dict[str, Any]:
        position: dict[str, Any] = {
            "epoch": self.epoch,
            "offset": self.offset,
            "validation_offset": self.validation_offset,
            "seed": self.seed,
        }
        if (global_batch := self.data.global_batch) is not None:
            position["global_batch"] = global_batch
        if own := self.data.own_seeds():
            position["loader_seeds"] = own
        if self.parts.split > 1:
            position["split"] = self.parts.split
        if self.data.trains_on != "train":
            position["trains_on"] = self.data.trains_on
        if stream := self.data.position(self.epoch, self.offset):
            position["stream"] = stream
        return position

    def move_to(self, position: dict[str, Any], global_step: int) -> None:
        self.epoch, self.offset = position["epoch"], position["offset"]
        self.validation_offset = position.get("validation_offset", 0)
        self.data.trains_on = position.get("trains_on", "train")
        self.parts.split = position.get("split", 1)
        self.global_step = global_step
        self.reseed(position.get("seed", self.seed), position.get("loader_seeds", {}))
        self.data.move_to(position.get("stream", {}))

    def reseed(self, seed: int, loader_seeds: Mapping[str, int] | None = None) -> None:
        self.seed = seed
        self.data.reseed(seed, loader_seeds or {})

    # ---- steps

    def begin_batch(self, place: MicroBatch) -> None:
        self.step.run(place)
        for feature in self.features:
            feature.begin_batch(place)

    def commit(self, num_batches: int = 1) -> None:
        for feature in self.features:
            feature.before_commit()
        self.step.commit()
        self.global_step += num_batches
        for feature in self.features:
            feature.commit()

    def roll_back(self) -> None:
        for feature in self.features:
            feature.roll_back()
        self.step.discard()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for feature in self.features:
                stack.enter_context(feature.evaluating())
            try:
                yield
            except Exception as error:
                if self.parts.is_tolerable(error):
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

    @abstractmethod
    def minimum(self, value: int) -> int:
        """Return the smallest `value` of all ranks. Every rank must call it."""

    @abstractmethod
    def from_rank(self, make: Callable[[], Any], rank: int) -> Any:
        """Call `make` on `rank`, and return its result on all ranks. Every rank must call this."""

    def enter(self, context: WorkerContext, batch_share: int | None) -> None:
        self.settings.context = context
        self.settings.batch_share = batch_share
        self.data.enter()
        for feature in self.features:
            feature.enter()

    @abstractmethod
    def share_training_state(self, leader: int, follows: bool) -> None:
        """Load the state of rank `leader` if this rank `follows`. Every rank must call it."""

    @property
    def replicated(self) -> bool:
        return any(feature.replicates for feature in self.features)

    @property
    def sharded(self) -> list[ShardedFeature]:
        """Features that shard the state. If there are any, no worker has all of it."""
        return [each for each in self.features if isinstance(each, ShardedFeature)]

    @property
    def ranks_in_sync(self) -> bool:
        return all(feature.ranks_in_sync for feature in self.sharded)

    # ---- state

    @abstractmethod
    def settable(self) -> Any:
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


def listed(given: Any) -> list[Any]:
    """Return registered objects as a new list."""
    return list(given) if isinstance(given, list | tuple) else [given]


def shaped_like(given: Any, members: list[Any]) -> Any:
    """Return `members` in the shape of `given`: a single one, a list, or a tuple."""
    if isinstance(given, tuple):
        return tuple(members)
    return members if isinstance(given, list) else members[0]
