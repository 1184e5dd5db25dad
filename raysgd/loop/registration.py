"""What an operator registered, and where its training stands, whatever the framework."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import GeneratorType, MappingProxyType
from typing import TYPE_CHECKING, Any

from raysgd.context import Preemption, WorkerContext
from raysgd.data import Dataset
from raysgd.data.shard import Place
from raysgd.data.source import Source, own_split
from raysgd.errors import CheckpointError
from raysgd.loop.feature import StepFeature
from raysgd.loop.micro_batches import MicroBatches
from raysgd.loop.step import Step
from raysgd.metrics import AverageMeterCollection
from raysgd.options import Options
from raysgd.timers import TimerCollection

if TYPE_CHECKING:
    from raysgd.loop.segment import Segment

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
        self.segment: Segment | None = None
        """The segment of training under way."""
        self._sources: dict[str, Source] = {}
        self._trains_on = "train"

    @property
    def place(self) -> Place:
        """Place of the current batch in its step."""
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
    def wrap(self, loader: Any, training: bool) -> Source:
        """Return the source of batches for a loader, or for a `Dataset` given with a call."""

    def register_data(self, train_loader: Any, validation_loader: Any) -> None:
        """See ``register_data`` of the operator."""
        if train_loader is not None:
            given = "register_data(train_loader=...)"
            self._sources["train"] = self._wrapped(given, train_loader, training=True)
        if validation_loader is None:
            return
        given_alone = "register_data(validation_loader=...)"
        for name in [*self.validation_sources()]:
            self._sources.pop(f"validation/{name}" if name else "validation", None)
        for name, loader in self.by_name(validation_loader).items():
            key = f"validation/{name}" if name else "validation"
            given = f"register_data(validation_loader={{{name!r}: ...}})" if name else given_alone
            self._sources[key] = self._wrapped(given, loader, training=False)

    def _wrapped(self, given: str, loader: Any, training: bool) -> Source:
        # the protocol of sequences, which a map-style data set has, is one of iteration as well
        if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
            raise TypeError(f"{given} must be iterable, but it is {loader!r}.")
        if isinstance(loader, GeneratorType):
            raise TypeError(
                f"{given}: a generator can be read once, and has no second epoch. Register an "
                "object whose __iter__ is the generator: a class, an IterableDataset, a list."
            )
        source = self.wrap(loader, training=training)
        if not source.partitioned_by and self.settings.options.num_workers > 1:
            self.say(
                given,
                "%s: raysgd cannot partition this %s, because %s. Every worker reads all that it "
                "gives. Let it select a part by self.world_rank and self.world_size each time it "
                "is read. If it does so already, pass add_dist_sampler=False to the trainer, or "
                "give the loader, its data set, or its sampler an attribute num_replicas.",
                given,
                type(loader).__name__,
                source.why_whole,
            )
        return source

    def by_name(self, loader: Any) -> Mapping[str, Any]:
        """Return several loaders by their names; a single one by the empty name."""
        return {"": loader}

    def has(self, name: str) -> bool:
        """Whether there is a train or validation loader."""
        return any(key.partition("/")[0] == name for key in self._sources)

    def source(self, name: str) -> Any:
        """Return the registered train or validation loader; where they have names, a dict of them.

        Raises:
            RuntimeError: if there is none.
        """
        if not self.has(name):
            raise _missing(name)
        return self._sources[name] if name in self._sources else self.validation_sources()

    def readable(self, name: str) -> Source:
        """Return the same; where there is none, one that raises as soon as a loop reads it."""
        return self._sources[name] if name in self._sources else Source(_Missing(name))

    def validation_sources(self) -> dict[str, Source]:
        """Return what to validate on by name; a single loader has the empty name."""
        keys = [key for key in self._sources if key.partition("/")[0] == "validation"]
        found = {key.partition("/")[2]: self._sources[key] for key in keys}
        return found or {"": self.readable("validation")}

    def sources_of(self, loader: Any) -> dict[str, Source]:
        """Return a loader that was given with a call, or several by name, shared out.

        Raises:
            TypeError: if it is none, or one that every worker would read whole.
        """
        found = {}
        for name, each in self.by_name(loader).items():
            source = found[name] = self._wrapped("The loader", each, training=False)
            is_partitioned = source.partitioned_by not in ("", "your code")
            if not is_partitioned and self.context.world_size > 1:
                raise TypeError(
                    f"A {type(each).__name__} was given, which cannot be shared out: every worker "
                    "would read all of it. Give a DataLoader of a data set that has a length and "
                    "can be indexed to a trainer with add_dist_sampler=True."
                )
        return found

    def training_source(self, dataset: Dataset | None) -> tuple[Source, bool]:
        """Return what to train on, and whether that is another source than before.

        A data set given with the call takes the place of the registered loader. An epoch that is
        part-finished on one of them is given up when the other is used.
        """
        name = "train" if dataset is None else f"dataset {dataset.uid}"
        if dataset is not None and name not in self._sources:
            for old in [key for key in self._sources if key.startswith("dataset ")]:
                del self._sources[old]
            source = self.wrap(dataset, training=True)
            # also where it equals a share, which it may do on some of the workers only
            source.set_batch_size(dataset.batch_size, follows_share=False)
            self._sources[name] = source
        changed = name != self._trains_on
        if changed:
            self._trains_on, self.offset = name, 0
        return self.readable(name), changed

    def describe_data(self) -> dict[str, str]:
        """Say of each loader how the workers divide it."""
        return {
            name: f"partitioned by {source.partitioned_by}: {source.describe()}"
            if source.partitioned_by
            else f"read whole by each worker, because {source.why_whole}: {source.describe()}"
            for name, source in self._sources.items()
        }

    def warn_of_stale_ranks(self) -> None:
        """Warn of loaders that select their part by ranks of an earlier group."""
        now = self.context.world_size, self.context.world_rank
        for name, source in self._sources.items():
            then = None if source.sharded else own_split(source.loader)
            if then is None or not isinstance(then[0], int) or name in self._said:
                continue
            if then[0] != now[0] or then[1] not in (None, now[1]):
                self._said.add(name)
                logger.warning(
                    "The %s loader selects its part by rank %s of %d workers, but this worker is "
                    "rank %d of %d now: samples are repeated and left out. Make the loader in "
                    "on_world_change(self) of the operator, and register it there.",
                    name,
                    then[1],
                    then[0],
                    now[1],
                    now[0],
                )

    def fingerprint(self) -> dict[str, str]:
        """Return what the loaders that are shared out must have in common on all workers."""
        found = {name: source.fingerprint() for name, source in self._sources.items()}
        return {name: text for name, text in found.items() if text}

    def batching(self) -> dict[str, tuple[int, bool]]:
        """Return by what batches the loaders are shared out that raysgd makes the batches of."""
        batching = {name: source.batching() for name, source in self._sources.items()}
        return {name: each for name, each in batching.items() if each is not None}

    def set_batch_size(self, batching: dict[str, tuple[int, bool]]) -> None:
        """Share the loaders out by the batches of another worker."""
        for name in batching.keys() & self._sources.keys():
            self._sources[name].set_batch_size(*batching[name])

    @property
    def global_batch(self) -> int | None:
        """Samples of a step of training; None where the loader is not shared out by samples."""
        source = self._sources.get(self._trains_on)
        return None if source is None else source.global_batch

    @property
    def keeps_global_batch(self) -> bool:
        """Whether ``config[BATCH_SIZE]`` is the size of a step to the sample."""
        source, given = self._sources.get("train"), self.settings.global_batch
        return source is not None and source.keeps_step and source.global_batch == given

    def release(self) -> None:
        """Let go of the loaders' worker processes."""
        for source in self._sources.values():
            source.close_workers()

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
        if (global_batch := self.global_batch) is not None:
            position["global_batch"] = global_batch
        seeds = {name: source.own_seed for name, source in self._sources.items()}
        if own := {name: seed for name, seed in seeds.items() if seed is not None}:
            position["loader_seeds"] = own
        if self.parts.split > 1:
            position["split"] = self.parts.split
        if self._trains_on != "train":
            # the offset is one in the data set that was given with the newest call
            position["trains_on"] = self._trains_on
        return position

    def move_to(self, position: dict[str, Any], global_step: int) -> None:
        """Go to a position in the data."""
        self.epoch, self.offset = position["epoch"], position["offset"]
        self.validation_offset = position.get("validation_offset", 0)
        self._trains_on = position.get("trains_on", "train")
        self.parts.split = position.get("split", 1)
        self.global_step = global_step
        self.reseed(position.get("seed", self.seed), position.get("loader_seeds", {}))

    def reseed(self, seed: int, loader_seeds: Mapping[str, int] = MappingProxyType({})) -> None:
        """Let the order of the epochs follow from `seed`, or from what loaders had of their own."""
        self.seed = seed
        for name, source in self._sources.items():
            source.reseed(seed, loader_seeds.get(name))

    def enter(self, context: WorkerContext, batch_share: int | None) -> None:
        """Enter a new generation: share data out anew."""
        self.settings.context = context
        self.settings.batch_share = batch_share
        for source in self._sources.values():
            source.reshard(context.world_size, context.world_rank, batch_share)

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

    def begin_batch(self, place: Place) -> None:
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
        now, workers = self.global_batch, self.settings.options.num_workers
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

    def say_what_changes(self) -> None:
        """Say, when the group is smaller for the first time, where its steps become smaller."""
        source, size = self._sources.get("train"), self.context.world_size
        full_size = self.settings.full_size or size
        if source is not None and size < full_size and not source.keeps_step:
            self.say(
                "smaller",
                "The steps become smaller with the group, which has %d of %d workers: raysgd does "
                "not make the batches of the train loader (%s), and cannot keep the global batch "
                "and the number of steps of an epoch. It can where it shares out a map-style "
                "loader that has a batch size.",
                size,
                full_size,
                type(source.loader).__name__,
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
    def in_rows(self) -> bool:
        """Whether each worker has rows of the models."""
        return False

    @property
    def lacks_state(self) -> bool:
        """Whether shares were lost with all workers that had them."""
        return False

    @property
    def settled(self) -> bool:
        """Whether all that is held is of the last committed step."""
        return True

    def share_of_state(self) -> list[Any]:
        """Return this worker's share of the state of each optimizer, where it is divided."""
        return []

    def held_state(self) -> list[Any]:
        """Return all that this worker holds of what is divided."""
        return []

    def take_held(self, held: Sequence[Any]) -> None:  # noqa: B027
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


class _Missing:
    """Stands for a loader that was not registered, for loops that have batches of their own."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __iter__(self) -> Iterator[Any]:
        raise _missing(self._name)
        yield  # makes it a generator, so that it raises when it is read


def _missing(name: str) -> RuntimeError:
    return RuntimeError(
        f"There is no {name} loader. Call self.register_data({name}_loader=...) in setup."
    )


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
