"""The loaders that an operator registered, and the loader that it trains on."""

import functools
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import GeneratorType
from typing import Any

from raysgd._internal.paths import without_secrets
from raysgd._internal.provenance import without_homes
from raysgd.data import Dataset
from raysgd.data.source import BatchSource, length_of, size_and_rank_of
from raysgd.loop.options import WorkerSettings

logger = logging.getLogger(__name__)


class DataSources(ABC):
    """The loaders of one operator, each wrapped in a `BatchSource`."""

    def __init__(self, settings: WorkerSettings, seed: int) -> None:
        self._settings = settings
        self.seed = seed  # of the order of epochs, if the loader has none of its own
        self._sources: dict[str, BatchSource] = {}  # keys: train, validation, dataset UID
        self.registered_loaders: dict[str, Any] = {}
        """The newest loaders, as user code passed them. Keys: train, validation."""
        self.training_source_name = "train"

    @abstractmethod
    def wrap(self, loader: Any, training: bool) -> BatchSource:
        """Return the source for a loader, or for a `Dataset` that was passed to a call."""

    def register(self, train_loader: Any, validation_loader: Any) -> None:
        self.__dict__.pop("loader_summaries", None)
        loaders = {"train": train_loader, "validation": validation_loader}
        for name, loader in loaders.items():
            if loader is not None:
                self.registered_loaders[name] = loader
                shown = f"register_data({name}_loader=...)"
                self._sources[name] = self._check_and_wrap(shown, loader, training=name == "train")

    def _check_and_wrap(self, argument: str, loader: Any, training: bool) -> BatchSource:
        # Map-style data sets without __iter__ are iterable through __getitem__.
        if hasattr(loader, "iter_torch_batches"):
            raise TypeError(
                f"{argument}: a {type(loader).__name__} of Ray Data has no batches. Pass its "
                "iter_torch_batches(batch_size=...)."
            )
        is_read = isinstance(loader, Iterable) or inspect.isgeneratorfunction(loader)
        if isinstance(loader, type) or not (is_read or hasattr(loader, "__getitem__")):
            raise TypeError(f"{argument} must be iterable, but it is {loader!r:.200}.")
        if isinstance(loader, GeneratorType):
            raise TypeError(
                f"{argument}: a generator can be read only once, so it has no second epoch. "
                "Register the generator function, or a list."
            )
        if inspect.isgeneratorfunction(loader):
            loader = GeneratorFunction(loader)
        source = self.wrap(loader, training=training)
        options = self._settings.options
        if source.reading_advice and options.num_workers > 1:
            self._settings.warn_once(
                source.reading_advice,
                "%s: %s: %s. To read each sample on one worker only, %s.",
                argument,
                source.describe(),
                source.who_reads,
                source.reading_advice,
            )
        # With logical workers, an error follows.
        warns = options.num_workers > 1 and not options.layout.has_logical_workers
        if source.why_not_partitioned and warns:
            self._settings.warn_once(
                argument,
                "%s: raysgd cannot partition this %s, because %s. Every worker reads all of it, "
                "and num_samples counts each sample once for each worker. Select a part by "
                "self.world_rank and self.world_size, and pass add_dist_sampler=False to the "
                "trainer or give the loader an attribute num_replicas.",
                argument,
                type(loader).__name__,
                source.why_not_partitioned,
            )
        return source

    def has(self, name: str) -> bool:
        return name in self._sources

    def source(self, name: str) -> BatchSource:
        """Return the source of the train or validation loader."""
        if not self.has(name):
            raise missing_loader_error(name)
        return self._sources[name]

    def source_or_missing(self, name: str) -> BatchSource:
        """Return the source of a loader. If there is none, reading the source raises an error."""
        return self._sources[name] if self.has(name) else BatchSource(_raise_missing(name))

    def wrap_argument(self, loader: Any) -> BatchSource:
        """Return the source of a loader that was passed to a call."""
        source = self._check_and_wrap("The loader", loader, training=False)
        if not source.is_partitioned and self._settings.context.world_size > 1:
            raise TypeError(
                f"raysgd cannot partition this {type(loader).__name__}, so every worker would read "
                "all of it. Pass a DataLoader of a data set that has a length and can be indexed, "
                "to a trainer with add_dist_sampler=True."
            )
        return source

    def select_training(self, dataset: Dataset | None) -> BatchSource:
        """Return the source to train on, and remember its name in `training_source_name`."""
        name = "train" if dataset is None else f"dataset {dataset.uid}"
        if dataset is not None and not self.has(name):
            source = self.wrap(dataset, training=True)
            self._sources = {k: v for k, v in self._sources.items() if not k.startswith("dataset")}
            self._sources[name] = source
            source.set_batch_size(dataset.batch_size, follows_config=False)
        self.training_source_name = name
        return self.source_or_missing(name)

    def warn_of_stale_ranks(self) -> None:
        """Warn about loaders that select their part by ranks of an earlier group."""
        context = self._settings.context
        for name, source in self._sources.items():
            split = None if source.is_partitioned else size_and_rank_of(source.loader)
            if split is None or not isinstance(split[0], int):
                continue
            size, rank = split
            if size != context.world_size or rank not in (None, context.world_rank):
                logger.warning(
                    "The %s loader selects its part by rank %s of %d workers, but this worker is "
                    "rank %d of %d now. Some samples are repeated, and others are skipped. "
                    "Register the loader in on_world_change(self) of the operator.",
                    name,
                    rank,
                    size,
                    context.world_rank,
                    context.world_size,
                )

    def warn_of_another_part(self, position: Mapping[str, Any]) -> None:
        """Warn if this worker's part, which user code selects, has another number of batches."""
        source, info = self.training_source, position.get("stream", {})
        batches = info.get("num_batches"), length_of(source.loader)
        if None not in batches and batches[0] != batches[1]:
            self._settings.warn_once(
                "part of a worker",
                "This worker's part of an epoch had %d batches when the state was saved, and has "
                "%d now. The epoch continues after as many batches as before, so samples are "
                "repeated or skipped. Load a checkpoint of the end of an epoch.",
                *batches,
            )

    def warn_of_other_steps(self, position: Mapping[str, Any]) -> None:
        """Warn if steps have another number of samples than at a saved position."""
        now, then = self.training_source.global_batch_size, position.get("global_batch")
        keeps_size = self._settings.options.layout.keeps_global_batch
        if keeps_size and None not in (now, then) and now != then:
            self._settings.warn_once(
                "step size",
                "A step had %d samples when the state was saved, and has %d now. This changes the "
                "length of epochs and schedules. To keep the size, register loaders with "
                "config[BATCH_SIZE] and pass config={BATCH_SIZE: %d}.",
                then,
                now,
                then,
            )

    # ---- agreement between the workers

    def fingerprint(self) -> dict[str, str]:
        """Return a text for each partitioned loader that must be equal on all workers."""
        texts = {name: source.fingerprint() for name, source in self._sources.items()}
        for name, (size, _) in self.batching().items():
            texts[name] += f", batch size {size}"
        return {name: text for name, text in texts.items() if text}

    @functools.cached_property
    def loader_summaries(self) -> dict[str, dict[str, Any]]:
        """The number of samples, if known, and a fingerprint of each registered loader."""
        summaries: dict[str, dict[str, Any]] = {}
        for name in filter(self.has, ("train", "validation")):
            source = self._sources[name]
            count = source.epoch_samples if source.knows_sizes else 0  # 0 also counts as unknown
            total = length_of(getattr(source.loader, "dataset", None)) or count
            summaries[name] = {"samples": total} if total else {}
            shown = without_secrets(source.fingerprint() or source.describe())
            summaries[name]["fingerprint"] = without_homes(shown)
        return summaries

    def batching(self) -> dict[str, tuple[int, bool]]:
        """Return the `BatchSource.batching` of each loader whose batches raysgd creates."""
        batching = {name: source.batching() for name, source in self._sources.items()}
        return {name: known for name, known in batching.items() if known is not None}

    def check_equal_data(self, expected: dict[str, str]) -> None:
        actual, rank = self.fingerprint(), self._settings.context.world_rank
        for name in expected.keys() & actual.keys():
            if actual[name] != expected[name]:
                raise ValueError(
                    f"The workers registered different data as {name}_loader: {actual[name]} on "
                    f"worker {rank}, and {expected[name]} on another. Register the same data set "
                    "on every worker, and pass seeded generators to random_split and the like. "
                    "Register data that changes later in on_world_change(self), by a value of "
                    "state_dict(), because new workers call both. If each worker reads its own "
                    "part, pass add_dist_sampler=False to the trainer."
                )

    def set_batch_size(self, batching: dict[str, tuple[int, bool]]) -> None:
        for name in batching.keys() & self._sources.keys():
            self._sources[name].set_batch_size(*batching[name])

    @property
    def training_source(self) -> BatchSource:
        """The source that the operator trains on."""
        return self.source_or_missing(self.training_source_name)

    @property
    def knows_sizes(self) -> bool:
        """Whether the sizes of all batches of training are known, unless there is no loader."""
        source = self._sources.get(self.training_source_name)
        return source is None or source.knows_sizes

    def end_processes(self) -> None:
        for source in self._sources.values():
            source.end_processes()

    def describe(self) -> dict[str, str]:
        """Describe how the workers read each loader."""
        return {name: f"{s.describe()}: {s.who_reads}" for name, s in self._sources.items()}

    def own_seeds(self) -> dict[str, int]:
        return {name: s.own_seed for name, s in self._sources.items() if s.own_seed is not None}

    def reseed(self, seed: int, loader_seeds: Mapping[str, int] | None = None) -> None:
        self.seed = seed
        for name, source in self._sources.items():
            source.reseed(seed, (loader_seeds or {}).get(name))

    def repartition(self) -> None:
        context, worker_batch_size = self._settings.context, self._settings.worker_batch_size
        for source in self._sources.values():
            source.repartition(context.world_size, context.world_rank, worker_batch_size)


class GeneratorFunction:
    """An iterable that calls a generator function in each epoch."""

    def __init__(self, function: Callable[[], Iterator[Any]]) -> None:
        self._function = function

    def __iter__(self) -> Iterator[Any]:
        return self._function()

    def __repr__(self) -> str:
        return f"the generator function {self._function.__name__}"


def _raise_missing(name: str) -> Iterator[Any]:
    """Raise an error when read. A loop with its own batches never reads it."""
    raise missing_loader_error(name)
    yield


def missing_loader_error(name: str) -> RuntimeError:
    return RuntimeError(
        f"There is no {name} loader. Call self.register_data({name}_loader=...) in setup."
    )


def empty_loader_error(name: str, source: BatchSource) -> RuntimeError:
    return RuntimeError(
        f"The {name} loader has no batches: {source.describe()}. Use more data, a smaller batch "
        "size, or drop_last=False. An iterator can be read only once, so register a list or a "
        "DataLoader."
    )
