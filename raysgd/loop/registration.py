"""What an operator registered, and where its training stands, whatever the framework."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from raysgd.context import WorkerContext
from raysgd.data import Dataset
from raysgd.data.source import Source
from raysgd.errors import CheckpointError
from raysgd.metrics import AverageMeterCollection
from raysgd.options import Options
from raysgd.timers import TimerCollection

if TYPE_CHECKING:
    from raysgd.loop.segment import Segment

__all__ = ["Registration", "Settings", "check_parts", "listed", "shaped_like"]


@dataclass
class Settings:
    """The trainer's arguments, and where this worker is."""

    options: Options
    context: WorkerContext = field(default_factory=WorkerContext)
    batch_share: int | None = None
    """This worker's share of ``config[BATCH_SIZE]``."""


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
        self.scales = False
        """Whether updates may be skipped since gradients overflowed."""
        self.meters: AverageMeterCollection | None = None
        self.segment: Segment | None = None
        """The segment of training under way."""
        self._sources: dict[str, Source] = {}
        self._trains_on = "train"

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
        for name, loader in (("train", train_loader), ("validation", validation_loader)):
            if loader is None:
                continue
            # the protocol of sequences, which a map-style data set has, is one of iteration as well
            if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
                raise TypeError(
                    f"register_data({name}_loader=...) must be iterable, but it is {loader!r}."
                )
            self._sources[name] = self.wrap(loader, training=name == "train")

    def has(self, name: str) -> bool:
        """Whether there is a train or validation loader."""
        return name in self._sources

    def source(self, name: str) -> Source:
        """Return the registered train or validation loader.

        Raises:
            RuntimeError: if there is none.
        """
        if name not in self._sources:
            raise _missing(name)
        return self._sources[name]

    def readable(self, name: str) -> Source:
        """Return the same; where there is none, one that raises as soon as a loop reads it."""
        return self._sources[name] if self.has(name) else Source(_Missing(name))

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

    def fingerprint(self) -> dict[str, str]:
        """Return what the loaders that are shared out must have in common on all workers."""
        return {name: s.fingerprint() for name, s in self._sources.items() if s.sharded}

    def batching(self) -> dict[str, tuple[int, bool]]:
        """Return by what batches the loaders are shared out that raysgd makes the batches of."""
        batching = {name: source.batching() for name, source in self._sources.items()}
        return {name: each for name, each in batching.items() if each is not None}

    def set_batch_size(self, batching: dict[str, tuple[int, bool]]) -> None:
        """Share the loaders out by the batches of another worker."""
        for name in batching.keys() & self._sources.keys():
            self._sources[name].set_batch_size(*batching[name])

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
        }
        seeds = {name: source.own_seed for name, source in self._sources.items()}
        if own := {name: seed for name, seed in seeds.items() if seed is not None}:
            position["loader_seeds"] = own
        if self._trains_on != "train":
            # the offset is one in the data set that was given with the newest call
            position["trains_on"] = self._trains_on
        return position

    def move_to(self, position: dict[str, Any], global_step: int) -> None:
        """Go to a position in the data."""
        self.epoch, self.offset = position["epoch"], position["offset"]
        self.validation_offset = position.get("validation_offset", 0)
        self._trains_on = position.get("trains_on", "train")
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
    def group_position(self) -> int:
        """Batches of the accumulation group before the one under way."""
        return 0

    @property
    def num_skipped(self) -> int:
        """How many updates were skipped so far, since gradients overflowed."""
        return 0

    @property
    @abstractmethod
    def updated(self) -> bool:
        """Whether every optimizer has stepped since the last commit."""

    def begin_batch(self, position: int, planned: int, is_last: bool) -> None:  # noqa: B027
        """Begin a batch of an accumulation group."""

    @abstractmethod
    def commit(self, num_batches: int = 1) -> None:
        """Count batches whose update is done."""

    @abstractmethod
    def roll_back(self) -> None:
        """Take back what a step that was not committed left behind."""

    def end_segment(self) -> None:  # noqa: B027
        """Settle what a segment of training leaves open."""

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

    def check_averaged(self) -> None:  # noqa: B027
        """Refuse to train what the workers would not average."""

    def sync_buffers(self) -> None:  # noqa: B027
        """Give every rank what is not trained, and may differ, of rank 0."""

    def validating(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which nothing communicates."""
        return contextlib.nullcontext()

    # ---- state

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
