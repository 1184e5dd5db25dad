"""The loaders that an operator registered, and the one that it trains on."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from types import GeneratorType, MappingProxyType
from typing import TYPE_CHECKING, Any

from raysgd.data import Dataset
from raysgd.data.source import BatchSource, own_split

if TYPE_CHECKING:
    from raysgd.loop.train_state import TrainState

__all__ = ["DataSources"]

logger = logging.getLogger(__name__)


class DataSources(ABC):
    """The sources of batches of one operator, by the names of their loaders."""

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._sources: dict[str, BatchSource] = {}
        self._warned: set[str] = set()
        self.trains_on = "train"
        """The name of the source whose epoch is in progress."""

    @abstractmethod
    def wrap(self, loader: Any, training: bool) -> BatchSource:
        """Return the source of batches for a loader, or for a `Dataset` given with a call."""

    def by_name(self, loader: Any) -> Mapping[str, Any]:
        """Return several loaders by their names; a single one by the empty name."""
        return {"": loader}

    def register(self, train_loader: Any, validation_loader: Any) -> None:
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

    def _wrapped(self, given: str, loader: Any, training: bool) -> BatchSource:
        # the protocol of sequences, which a map-style data set has, is one of iteration as well
        if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
            raise TypeError(f"{given} must be iterable, but it is {loader!r}.")
        if isinstance(loader, GeneratorType):
            raise TypeError(
                f"{given}: a generator can be read once, and has no second epoch. Register an "
                "object whose __iter__ is the generator: a class, an IterableDataset, a list."
            )
        source = self.wrap(loader, training=training)
        if not source.partitioned_by and self._state.settings.options.num_workers > 1:
            self._state.say(
                given,
                "%s: raysgd cannot partition this %s, because %s. Every worker reads all that it "
                "gives, and num_samples counts each sample once for each worker. Let it select a "
                "part by self.world_rank and self.world_size each time it is read. If it does so "
                "already, pass add_dist_sampler=False to the trainer, or give the loader, its data "
                "set, or its sampler an attribute num_replicas.",
                given,
                type(loader).__name__,
                source.why_whole,
            )
        return source

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

    def readable(self, name: str) -> BatchSource:
        """Return the source, or one that raises as soon as a loop reads it."""
        return self._sources[name] if name in self._sources else BatchSource(_Missing(name))

    def validation_sources(self) -> dict[str, BatchSource]:
        """Return what to validate on by name; a single loader has the empty name."""
        keys = [key for key in self._sources if key.partition("/")[0] == "validation"]
        found = {key.partition("/")[2]: self._sources[key] for key in keys}
        return found or {"": self.readable("validation")}

    def sources_of(self, loader: Any) -> dict[str, BatchSource]:
        """Return a loader that was given with a call, or several by name, shared out.

        Raises:
            TypeError: if it is none, or one that every worker would read whole.
        """
        found = {}
        for name, each in self.by_name(loader).items():
            source = found[name] = self._wrapped("The loader", each, training=False)
            is_partitioned = source.partitioned_by not in ("", "your code")
            if not is_partitioned and self._state.context.world_size > 1:
                raise TypeError(
                    f"A {type(each).__name__} was given, which cannot be shared out: every worker "
                    "would read all of it. Give a DataLoader of a data set that has a length and "
                    "can be indexed to a trainer with add_dist_sampler=True."
                )
        return found

    def training_source(self, dataset: Dataset | None) -> tuple[BatchSource, bool]:
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
        changed = name != self.trains_on
        if changed:
            self.trains_on, self._state.offset = name, 0
        return self.readable(name), changed

    def describe(self) -> dict[str, str]:
        """Say of each loader how the workers divide it."""
        return {
            name: f"partitioned by {source.partitioned_by}: {source.describe()}"
            if source.partitioned_by
            else f"read whole by each worker, because {source.why_whole}: {source.describe()}"
            for name, source in self._sources.items()
        }

    def warn_of_stale_ranks(self) -> None:
        """Warn of loaders that select their part by ranks of an earlier group."""
        now = self._state.context.world_size, self._state.context.world_rank
        for name, source in self._sources.items():
            then = None if source.sharded else own_split(source.loader)
            if then is None or not isinstance(then[0], int) or name in self._warned:
                continue
            if then[0] != now[0] or then[1] not in (None, now[1]):
                self._warned.add(name)
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

    def check_like(self, expected: dict[str, str]) -> None:
        """Check that this worker shares out the same data as the others."""
        own, rank = self.fingerprint(), self._state.context.world_rank
        for name in expected.keys() & own.keys():
            if own[name] != expected[name]:
                raise ValueError(
                    f"The workers registered different data as {name}_loader: {own[name]} on "
                    f"worker {rank}, and {expected[name]} on another. A loader "
                    "that is shared out needs the same data set on every worker. Seed what is "
                    "random in setup, alike on all of them: random_split(..., generator="
                    "torch.Generator().manual_seed(0)), train_test_split(..., random_state=0), "
                    "torch.manual_seed(0). (add_dist_sampler=False would let each worker train on "
                    "all that it has registered: pass it only where that is a part of its own.)"
                )

    def check_batch_sizes(self, expected: dict[str, tuple[int, bool]]) -> None:
        """Check that this worker, at the start, has the batch sizes of rank 0.

        A replacement worker is not checked: it sets up for a group whose size is a guess, and with
        that its share of ``config[BATCH_SIZE]``.
        """
        own, rank = self.batching(), self._state.context.world_rank
        for name in expected.keys() & own.keys():
            (size, _), (other, _) = own[name], expected[name]
            if size != other:
                raise ValueError(
                    f"The workers registered different batch sizes with {name}_loader: {size} on "
                    f"worker {rank}, and {other} on worker 0. A loader that "
                    "is shared out needs the same on every worker: config[BATCH_SIZE], or a "
                    "number that does not depend on the worker. Where each worker reads a part "
                    "of its own, pass add_dist_sampler=False to the trainer."
                )

    def set_batch_size(self, batching: dict[str, tuple[int, bool]]) -> None:
        """Share the loaders out by the batches of another worker."""
        for name in batching.keys() & self._sources.keys():
            self._sources[name].set_batch_size(*batching[name])

    @property
    def global_batch(self) -> int | None:
        """Samples of a step of training; None where the loader is not shared out by samples."""
        source = self._sources.get(self.trains_on)
        return None if source is None else source.global_batch

    @property
    def keeps_global_batch(self) -> bool:
        """Whether ``config[BATCH_SIZE]`` is the size of a step to the sample."""
        source, given = self._sources.get("train"), self._state.settings.global_batch
        return source is not None and source.keeps_step and source.global_batch == given

    def release(self) -> None:
        """End the worker processes of the loaders."""
        for source in self._sources.values():
            source.close_workers()

    def own_seeds(self) -> dict[str, int]:
        """Return the seeds that loaders have of their own."""
        seeds = {name: source.own_seed for name, source in self._sources.items()}
        return {name: seed for name, seed in seeds.items() if seed is not None}

    def reseed(self, seed: int, loader_seeds: Mapping[str, int] = MappingProxyType({})) -> None:
        """Let the order of the epochs follow from `seed`, or from what loaders had of their own."""
        for name, source in self._sources.items():
            source.reseed(seed, loader_seeds.get(name))

    def enter(self) -> None:
        """Partition the data for a new generation."""
        context, share = self._state.context, self._state.settings.batch_share
        for source in self._sources.values():
            source.reshard(context.world_size, context.world_rank, share)

    def say_what_changes(self) -> None:
        """Say, when the group is smaller for the first time, where its steps become smaller."""
        source, size = self._sources.get("train"), self._state.context.world_size
        full_size = self._state.settings.full_size or size
        if source is not None and size < full_size and not source.keeps_step:
            self._state.say(
                "smaller",
                "The steps become smaller with the group, which has %d of %d workers: raysgd does "
                "not make the batches of the train loader (%s), and cannot keep the global batch "
                "and the number of steps of an epoch. It can where it shares out a map-style "
                "loader that has a batch size.",
                size,
                full_size,
                type(source.loader).__name__,
            )


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
