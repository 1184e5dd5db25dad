"""What an operator registered, and where its training stands, whatever the framework."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from raysgd._internal.context import Preemption, WorkerContext
from raysgd._internal.timers import TimerCollection
from raysgd.data.partition import MicroBatch
from raysgd.data.source import BatchSource
from raysgd.errors import CheckpointError
from raysgd.loop.feature import StepFeature
from raysgd.loop.micro_batches import MicroBatches
from raysgd.loop.options import Options
from raysgd.loop.sources import DataSources
from raysgd.loop.step import Step
from raysgd.metrics import AverageMeterCollection

if TYPE_CHECKING:
    from raysgd.loop.step_iterator import StepIterator

__all__ = ["Registration", "Settings", "WarmedUp", "check_parts", "listed", "shaped_like"]

logger = logging.getLogger(__name__)


class WarmedUp(BaseException):
    """Raised when a warm-up has computed its gradients; it passes through user code."""


@dataclass
class Settings:
    """The trainer's arguments, and where this worker is."""

    options: Options
    context: WorkerContext = field(default_factory=WorkerContext)
    batch_share: int | None = None
    """What the operator's ``config[BATCH_SIZE]`` is now, a worker's share of the global batch. In
    ``setup`` it is that of the full group, where steps keep their size."""
    global_batch: int | None = None
    """``config[BATCH_SIZE]``."""

    @property
    def full_size(self) -> int | None:
        """Workers of the full group, whose steps those of any other keep; None: they do not."""
        keeps = self.options.elastic.global_batch == "keep"
        return self.options.num_workers if keeps else None

    @property
    def placing(self) -> dict[str, Any]:
        """What a source has to know of the group to share data out."""
        full_size = self.full_size
        return {
            "world_size": self.context.world_size,
            "rank": self.context.world_rank,
            "full_size": full_size,
            "global_batch": None if full_size is None else self.global_batch,
        }


class Registration(ABC):
    """The training state of one operator.

    It holds what was registered and the position in the data, commits steps and takes them back,
    and has the collectives that this needs.
    """

    def __init__(self, settings: Settings, seed: int) -> None:
        self.settings = settings
        self.timers = TimerCollection()
        self.timers.disable()
        self.models: list[Any] = []
        self.optimizers: list[Any] = []
        self.registered = False
        self.epoch = 0
        self.offset = 0
        self.validation_offset = 0
        self.global_step = 0
        self.counted: dict[int, int] = {}
        """What user code says that the global step is, by what it was as it said so."""
        self.seed = seed
        self.accumulation_steps = 1
        """Batches that make one update."""
        self.step = Step()
        """The step in progress."""
        self.parts = MicroBatches(self)
        """Of batches that are too large."""
        self.features: list[StepFeature] = [self.parts]
        self._said: set[str] = set()
        self.scales = False
        """Whether updates may be skipped since gradients overflowed."""
        self.meters: AverageMeterCollection | None = None
        self.logged: dict[str, Any] | None = None
        """What user code has logged of the batch under way; None where nobody collects it."""
        self.preemption: Preemption | None = None
        """Which workers of the group are going to be taken away."""
        self.segment: StepIterator | None = None
        """The segment of training under way."""
        self.data = DataSources(self)

    @property
    def place(self) -> MicroBatch:
        """MicroBatch of the current batch in its step."""
        return self.step.place

    @property
    def context(self) -> WorkerContext:
        """This worker's ranks in the group."""
        return self.settings.context

    @property
    def given_models(self) -> list[Any]:
        """The models that were registered as such."""
        return self.models

    def check_unregistered(self) -> None:
        """Check that ``register`` is called for the first time."""
        if self.registered:
            raise RuntimeError(
                "register() was called twice; pass lists to register several models."
            )

    def check_registered(self, operator: Any) -> None:
        """Check that ``setup`` of the operator has registered something."""
        if not self.registered:
            raise RuntimeError(
                f"{type(operator).__name__}.setup did not register anything. Call "
                "self.register(models=..., optimizers=...) in it."
            )

    # ---- data

    @abstractmethod
    def wrap(self, loader: Any, training: bool) -> BatchSource:
        """Return the source of batches for a loader, or for a `Dataset` given with a call."""

    def by_name(self, loader: Any) -> Mapping[str, Any]:
        """Return several loaders by their names; a single one by the empty name."""
        return {"": loader}

    def register_data(self, train_loader: Any, validation_loader: Any) -> None:
        """See ``register_data`` of the operator."""
        self.data.register(train_loader, validation_loader)

    # ---- position

    def position(self) -> dict[str, Any]:
        """Return where training stands in the data."""
        position: dict[str, Any] = {
            "epoch": self.epoch,
            "offset": self.offset,
            "validation_offset": self.validation_offset,
            "seed": self.seed,
            "num_workers": self.settings.options.num_workers,
        }
        if (global_batch := self.data.global_batch) is not None:
            position["global_batch"] = global_batch
        if own := self.data.own_seeds():
            position["loader_seeds"] = own
        if self.parts.split > 1:
            position["split"] = self.parts.split
        if self.data.trains_on != "train":
            # the offset is one in the data set that was given with the newest call
            position["trains_on"] = self.data.trains_on
        return position

    def move_to(self, position: dict[str, Any], global_step: int) -> None:
        """Go to a position in the data."""
        self.epoch, self.offset = position["epoch"], position["offset"]
        self.validation_offset = position.get("validation_offset", 0)
        self.data.trains_on = position.get("trains_on", "train")
        self.parts.split = position.get("split", 1)
        self.global_step = global_step
        self.reseed(position.get("seed", self.seed), position.get("loader_seeds", {}))

    def reseed(self, seed: int, loader_seeds: Mapping[str, int] = MappingProxyType({})) -> None:
        """Let the order of the epochs follow from `seed`, or from what loaders had of their own."""
        self.seed = seed
        self.data.reseed(seed, loader_seeds)

    def enter(self, context: WorkerContext, batch_share: int | None) -> None:
        """Enter a new generation: share data out anew."""
        self.settings.context = context
        self.settings.batch_share = batch_share
        self.data.enter()

    def new_meters(self) -> AverageMeterCollection:
        """Return fresh meters, which the runner can read while an epoch is under way."""
        self.meters = AverageMeterCollection()
        return self.meters

    def epoch_is_over(self) -> bool:
        """Return whether a loop that has come to the end of its batches is at the end of an epoch.

        The loop may have wrapped the iterator that it was given, in tqdm say. One that has drawn
        nothing from it has batches of its own, and these count as a whole epoch.
        """
        segment = self.segment
        return segment is None or not segment.drawn_from or segment.loop_ends_epoch

    # ---- committed steps

    @property
    def compiling(self) -> bool:
        """Whether a model is being compiled, most likely."""
        return False

    @property
    def needs_warm_up(self) -> bool:
        """Whether a worker's first batch takes much longer than the others."""
        return False

    def without_update(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which a step raises `WarmedUp` instead of updating the models."""
        return contextlib.nullcontext()

    @property
    def num_skipped(self) -> int:
        """How many updates were skipped so far, since gradients overflowed."""
        return 0

    def begin_batch(self, place: MicroBatch) -> None:
        """Begin a batch, or a part of one.

        Raises:
            IndivisibleError: if it is seen that batches must not come in parts.
        """
        self.step.run(place)
        for feature in self.features:
            feature.begin_batch(place)

    def check_whole(self) -> None:
        """Check that the state is that of a completed step.

        Raises:
            RuntimeError: if it is not, and no other worker had such a state.
        """
        if self.step.is_partial:
            raise RuntimeError(
                f"The step after step {self.global_step} failed when it had changed some "
                "parameters: an optimizer raised within its step, or train_batch moved them "
                "itself. They cannot be restored. Load a checkpoint to continue: "
                "trainer.load(path)."
            )

    def say(self, key: str, message: str, *values: Any) -> None:
        """Log something, once, on one worker."""
        if self.context.world_rank == 0 and key not in self._said:
            self._said.add(key)
            logger.warning(message, *values)

    def compare_steps(self, position: Mapping[str, Any]) -> None:
        """Say where the steps of a state that is loaded were of another size than they are now."""
        now, workers = self.data.global_batch, self.settings.options.num_workers
        then, workers_then = position.get("global_batch"), position.get("num_workers")
        changed = now is not None and (then, workers_then) != (now, workers)
        if not changed or self.settings.full_size is None or self.context.world_rank != 0:
            return
        if then is None:
            logger.info(
                "The state does not say for steps of how many samples it was made, as an earlier "
                "version wrote it; steps have %d samples now.",
                now,
            )
        elif then == now:
            logger.info(
                "The state was made with num_workers=%s and is loaded with num_workers=%d; steps "
                "have %d samples as before.",
                workers_then,
                workers,
                now,
            )
        else:
            logger.warning(
                "The state was made with steps of %d samples (num_workers=%s), and steps have %d "
                "samples now (num_workers=%d): an epoch has another number of them, and schedulers "
                "that count steps end elsewhere. To go on as before, register loaders with "
                "config[BATCH_SIZE] and pass config={BATCH_SIZE: %d}.",
                then,
                workers_then,
                now,
                workers,
                then,
            )

    def commit(self, num_batches: int = 1) -> None:
        """Count batches whose update is done."""
        self.step.commit()
        self.global_step += num_batches
        for feature in self.features:
            feature.commit()

    def roll_back(self) -> None:
        """Discard the step in progress, if there is one, and restore what it changed."""
        for feature in reversed(self.features):
            feature.roll_back()
        self.step.discard()

    def measure_norms(self, wanted: bool) -> None:  # noqa: B027
        """Say whether steps note the norms of their gradients."""

    def gradient_norms(self) -> dict[str, float]:
        """Return the norms of the gradients of the newest step, where it has noted them."""
        return {}

    def end_epoch(self) -> None:
        """Let features do what is due after an epoch."""
        for feature in self.features:
            feature.end_epoch(self.epoch)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Return a context in which features let the models be evaluated."""
        with contextlib.ExitStack() as stack:
            for feature in self.features:
                stack.enter_context(feature.evaluating())
            yield

    def feature_states(self) -> dict[str, Any]:
        """Return what features add to the training state."""
        return {key: v for each in self.features for key, v in each.state_dict().items()}

    def end_segment(self) -> None:
        """Let features settle what a segment of training leaves open."""
        for feature in self.features:
            feature.end_segment()

    # ---- the other workers

    @abstractmethod
    def minimum(self, value: int) -> int:
        """Return the smallest `value` of all ranks. Every rank must call it."""

    @abstractmethod
    def from_rank(self, make: Callable[[], Any], rank: int) -> Any:
        """Return what `make` returns on one rank, on all ranks. Every rank must call it."""

    @abstractmethod
    def share_initial_state(self) -> None:
        """Give every rank the models and optimizers of rank 0. Every rank must call it."""

    @abstractmethod
    def share_training_state(self, leader: int, follows: bool) -> None:
        """Take over what rank `leader` has, if this rank `follows`. Every rank must call it."""

    @property
    def replicated(self) -> bool:
        """Whether the models are the same on every rank."""
        return True

    @property
    def divided(self) -> bool:
        """Whether each worker has a share of the state of optimizers, and none has all of it."""
        return False

    @property
    def is_fully_sharded(self) -> bool:
        """Whether each worker has rows of the models."""
        return False

    @property
    def lacks_shards(self) -> bool:
        """Whether shares were lost with all workers that had them."""
        return False

    @property
    def ranks_in_sync(self) -> bool:
        """Whether all that is held is of the last committed step."""
        return True

    def share_of_state(self) -> list[Any]:
        """Return this worker's share of the state of each optimizer, where it is divided."""
        return []

    def export_replica(self) -> list[Any]:
        """Return all that this worker holds of what is divided."""
        return []

    def import_replica(self, held: Sequence[Any]) -> None:  # noqa: B027
        """Hold what another worker held that goes, until all enter a new generation."""

    def check_averaged(self) -> None:  # noqa: B027
        """Refuse to train what the workers would not average."""

    def sync_buffers(self) -> None:  # noqa: B027
        """Give every rank what is not trained, and may differ, of rank 0."""

    def rehearsing(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context after which the models are as they were before it."""
        return contextlib.nullcontext()

    def validating(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which ranks may evaluate different numbers of batches."""
        return contextlib.nullcontext()

    # ---- state

    @abstractmethod
    def settable(self) -> Any:
        """Return what user code may set between steps, such as learning rates, to compare it."""

    @abstractmethod
    def training_state(self) -> dict[str, Any]:
        """Return models, optimizers and what belongs to them, as they are on this device."""

    @abstractmethod
    def check_training_state(self, state: dict[str, Any]) -> None:
        """Check that a state fits what is registered.

        Raises:
            CheckpointError: if it does not.
        """

    @abstractmethod
    def load_training_state(self, state: dict[str, Any]) -> None:
        """Take over what `training_state` returned."""

    @abstractmethod
    def copy_leaf(self, leaf: Any) -> Any:
        """Return a copy of a leaf of a state on its device, at a step boundary."""

    @abstractmethod
    def to_cpu(self, state: Any) -> Any:
        """Return a state on CPU, which nothing changes until it is on its way to the driver."""


def listed(given: Any) -> list[Any]:
    """Return what was registered as a list of its own."""
    return list(given) if isinstance(given, list | tuple) else [given]


def shaped_like(given: Any, members: list[Any]) -> Any:
    """Return `members` in the shape of `given`: a single one, a list or a tuple."""
    if isinstance(given, tuple):
        return tuple(members)
    return members if isinstance(given, list) else members[0]


def check_parts(
    name: str, objects: Sequence[Any], saved: Any, problem_of: Callable[[Any, Any], str]
) -> None:
    """Check the states of all registered models, optimizers or schedulers.

    Args:
        name: which of them.
        objects: what is registered.
        saved: what the state has for them.
        problem_of: says why an object cannot take a state; nothing if it can.
    """
    if not isinstance(saved, list | tuple) or not all(isinstance(s, Mapping) for s in saved):
        raise CheckpointError(f"The state's {name!r} must be a list of state dicts.")
    if len(saved) != len(objects):
        raise CheckpointError(
            f"The state has {len(saved)} {name}, and the operator registered {len(objects)}."
        )
    for index, (own, state) in enumerate(zip(objects, saved, strict=True)):
        if problem := problem_of(own, state):
            raise CheckpointError(
                f"The state is of another trainer: its {name}[{index}] does not fit the registered "
                f"{type(own).__name__}: {problem}."
            )
