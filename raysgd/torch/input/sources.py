"""Batch sources for PyTorch loaders. Each loader is partitioned or read by every worker."""

import copy
import functools
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from numbers import Integral
from typing import Any, Self

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from raysgd._internal.collectives import Collectives
from raysgd.data import Dataset as ItemDataset
from raysgd.data.partition import BY_WORKERS, StepLayout
from raysgd.data.records import Records
from raysgd.data.source import (
    BatchSource,
    PartitionedSource,
    SourceBatch,
    is_read_once,
    length_of,
    set_loader_epoch,
    size_and_rank_of,
)
from raysgd.data.stream import NumberedSamples, SampleKeys, close_files, file_stamps
from raysgd.loop.sources import DataSources
from raysgd.torch.input.batches import IGNORE_INDEX, collate_samples
from raysgd.torch.input.iterable_source import (
    IterableSource,
    collates_iterable,
    keeps_all_samples,
    known_length,
)
from raysgd.torch.input.loader_copies import (
    EpochSampler,
    SeededSamples,
    clone,
    is_distributed,
    unpartition,
    with_dataset,
    without_states,
)
from raysgd.torch.input.orders import (
    EpochOrder,
    Order,
    makes_own_batches,
    nested_datasets,
    pick_keys,
    sampler_of,
    seed_all,
)

_MISSING = object()


class TorchSources(DataSources):
    def register(self, train_loader: Any, validation_loader: Any) -> None:
        super().register(train_loader, validation_loader)
        options = self._settings.options
        if options.layout.has_logical_workers:
            for name, source in self._sources.items():
                _check_equal_bits(name, source)
        for loader in filter(collates_iterable, (train_loader, validation_loader)):
            if loader.persistent_workers and not hasattr(loader.dataset, "set_epoch"):
                self._settings.warn_once(
                    "persistent",
                    "%s is a stream, so persistent_workers=True has no effect: its loader "
                    "processes start with a new copy in each epoch, and do not keep a count of "
                    "epochs. Define set_epoch(epoch), which raysgd calls, and shuffle by it.",
                    type(loader.dataset).__name__,
                )
        if train_loader is None or options.num_workers == 1:
            return
        source = self.source("train")
        batch_size = getattr(source.loader, "batch_size", None)
        has_shares = source.is_partitioned and batch_size is not None
        if options.elastic.shares != "even" and not has_shares:
            raise ValueError(
                f"register_data(train_loader=...): ElasticConfig(shares=...) needs a DataLoader "
                "with a batch_size that raysgd partitions. raysgd cannot change the batch size of "
                f'{source.describe()}. Pass such a loader, or shares="even".'
            )
        keeps_order = type(getattr(source, "order_sampler", None)) is SequentialSampler
        # Do not ask samplers of users, which may count their epochs.
        if keeps_order and not source.shuffles and self._settings.context.generation <= 1:
            advice = "DataLoader(..., shuffle=True)"
            if isinstance(source.loader.dataset, NumberedSamples):
                advice = "Stream(..., shuffle=10_000)"
            self._settings.warn_once(
                "order",
                "The train loader does not shuffle. PyTorch's DistributedSampler would. "
                f"Write {advice}, unless you want the order of the data set.",
            )

    @property
    def ignores_targets(self) -> bool:
        sources = self._sources.values()
        return any(isinstance(each, MapStyleSource) and each.ignores_targets for each in sources)

    def wrap(self, loader: Any, training: bool) -> BatchSource:
        settings = self._settings
        return wrap_loader(
            loader,
            training=training,
            partitions=settings.options.add_dist_sampler,
            seed=self.seed,
            worker_batch_size=settings.worker_batch_size,
            **settings.partition_arguments,
        )


class MapStyleSource(PartitionedSource):
    """A map-style DataLoader, partitioned across the workers.

    The loader's sampler, the seed, and the epoch determine the order of an epoch, so workers know
    it without communication.
    """

    data_kind = "a map-style data set"

    def __init__(self, loader: DataLoader[Any], *, seed: int, **partition_arguments: Any) -> None:
        self.epoch_order = EpochOrder(loader)
        self.order_sampler = self.epoch_order.sampler
        data, keeps_order = loader.dataset, type(self.order_sampler) is SequentialSampler
        # The data set, if it has its own order of each epoch.
        self._numbered = data if keeps_order and isinstance(data, NumberedSamples) else None
        total, size = len(self.order_sampler), loader.batch_size
        super().__init__(loader, total, size, bool(loader.drop_last), **partition_arguments)
        self._assigns_batches = makes_own_batches(loader)
        self.reseed(seed)
        self.knows_sizes = keeps_all_samples(loader)
        # An item of a `raysgd.data.Dataset` can have several rows.
        self._collates = loader.batch_size is not None and loader.collate_fn != collate_samples
        self._kept_loader: DataLoader[Any] | None = None

    _current_size: Any = property(lambda self: len(self.order_sampler))

    @property
    def shuffles(self) -> bool:  # type: ignore[override]
        return (self.epoch_order if self._numbered is None else self._numbered).shuffles

    def _copy_for_user(self) -> Self:
        copied = super()._copy_for_user()
        copied._kept_loader, copied.epoch_order = None, copy.copy(self.epoch_order)
        return copied

    def read(self, epoch: int, offset: int, num_steps: int | None = None) -> Iterator[SourceBatch]:
        order = self._order_of(epoch, offset)  # first, because the length may depend on the epoch
        partition = self._partition = self.partition
        if offset:
            self.epoch_order.check_saved(epoch, self._saved)
        spans, same_spans = itertools.tee(partition.spans(offset, num_steps))
        if not self._assigns_batches and _only_collates_tensors(self.loader):
            rows = (self._rows(order, *span) for span in spans)
            return self._yield_batches(rows, order, same_spans, epoch)
        data: Any = self.loader.dataset
        if isinstance(data, NumberedSamples) and self._numbered is None:
            data.set_epoch(epoch)  # the keys of a sampler have no epoch
            self._kept_loader = None  # its processes have copies of the data set
        if (loader := self._kept_loader) is None:  # a copy that draws from a sampler of raysgd
            name = "sampler" if self.loader.batch_sampler is None else "batch_sampler"
            loader = clone(self.loader, **{name: EpochSampler()})
            if partition.layout.seeds_parts:
                loader = with_dataset(loader, SeededSamples(data))
            if self.loader.persistent_workers:
                self._kept_loader = loader
        seeds = (self._seed, epoch) if partition.layout.seeds_parts else None
        loader._index_sampler.keys = _keys(order, spans, seeds, self.loader.batch_size is not None)
        # The seeds of loader processes come from this generator, not from generators of the user.
        seed = self._seed + (epoch + 1) * partition.world_size + partition.rank
        loader.generator = torch.Generator().manual_seed(seed)
        self._iteration = iter(loader)
        return self._yield_batches(self._iteration, order, same_spans, epoch)

    def _rows(self, order: Order, start: int, stop: int) -> list[torch.Tensor]:
        keys = torch.arange(start, stop) if order is None else torch.as_tensor(order[start:stop])
        return [tensor[keys] for tensor in self.loader.dataset.tensors]

    def _yield_batches(
        self, batches: Iterator[Any], order: Order, spans: Iterator[tuple[int, int]], epoch: int
    ) -> Iterator[SourceBatch]:
        """Yield the batches that a loader has for `spans`. Raise an error if it has too few."""
        for number, (start, stop) in enumerate(spans):
            if (batch := next(batches, _MISSING)) is _MISSING:
                expected = number + 1 + sum(1 for _ in itertools.islice(spans, 10**6))
                raise RuntimeError(
                    f"The loader ended after {number} of {expected} batches. Its data set must not "
                    "raise StopIteration."
                )
            num_collated_samples = stop - start if self._collates else None
            if self._assigns_batches:
                num_collated_samples = sum(map(len, pick_keys(order, start, stop)))
            if self._partition.layout.seeds_parts:
                seed_all(self._seed, epoch, start)  # for user code
            yield SourceBatch(batch, num_collated_samples)
        next(batches, None)  # ends the loader's processes

    def indices(self, epoch: int) -> Iterator[Any]:
        """Iterate over the indices, or other keys, of this worker's samples in `epoch`."""
        order = self._order_of(epoch)
        return itertools.chain.from_iterable(pick_keys(order, *s) for s in self.partition.spans())

    def sample_ids(self, epoch: int, offset: int, num_samples: int) -> list[Any]:
        keys = pick_keys(self._order_of(epoch, offset), offset, offset + num_samples)
        if self._assigns_batches:
            keys = [*itertools.chain.from_iterable(keys)]
        if (numbered := self._numbered) is not None:
            return [numbered.locate(*key) for key in keys]
        return [int(key) if isinstance(key, Integral) else repr(key) for key in keys]

    def end_processes(self) -> None:
        super().end_processes()
        self._kept_loader = None
        close_files(self.loader.dataset)

    # ---- the order

    def reseed(self, seed: int, own_seed: int | None = None) -> None:
        if (generator := self.loader.generator) is not None:
            own_seed = generator.initial_seed() % 2**62 if own_seed is None else own_seed
            self.own_seed = seed = own_seed
        super().reseed(seed)
        self.epoch_order.seed = seed

    def _order_of(self, epoch: int, offset: int = 0) -> Order:
        if self._numbered is not None:
            partition = self._partition
            # The order of predictions stays.
            step = partition.global_batch_size if partition.training else 0
            return SampleKeys(self._numbered, epoch, offset, step)
        return self.epoch_order.draw(epoch)

    def agree_on_order(self, epoch: int, offset: int, collectives: Collectives) -> None:
        partition = self._partition
        self.epoch_order.agree(epoch, partition.rank, partition.world_size, collectives)

    # ---- for messages and comparisons

    def resume_info(self, epoch: int, offset: int) -> Mapping[str, Any]:
        if not offset:
            return {}
        info = {**file_stamps(self.loader.dataset), **super().resume_info(epoch, offset)}
        return info | {"order": self.epoch_order.order_id_to_save(epoch, self._saved)}

    def check_resume_info(self, info: Mapping[str, Any]) -> None:
        set_loader_epoch(self.order_sampler, info.get("epoch"))  # the length may depend on it
        super().check_resume_info(info)

    @functools.cached_property
    def ignores_targets(self) -> bool:
        """Whether data in memory has targets that losses of PyTorch ignore by default."""
        datasets = nested_datasets(self.loader.dataset)
        targets = [data.tensors[-1] for data in datasets if isinstance(data, TensorDataset)]
        return any(bool((target == IGNORE_INDEX).any()) for target in targets)

    def fingerprint(self) -> str:
        size = self._epoch_size  # when it was registered, as by a worker that joins later
        sizes = f"{size} samples, drop_last {self.partition.drop_last}"
        if self._assigns_batches:
            sizes = f"{size} batches of its {type(self.order_sampler).__name__}"
        elif self.loader.batch_size is None:
            sizes += ", batch_size None"
        if self.loader.generator is not None:
            sizes += ", a generator of its own"
        return f"{sizes}, {_content_of(self.loader.dataset)}"


def _keys(
    order: Order,
    spans: Iterator[tuple[int, int]],
    seeds: tuple[int, ...] | None,
    makes_batches: bool,
) -> Iterator[Any]:
    """Yield the keys of each batch, or single keys if the loader makes no batches.

    The sampler of a `MapStyleSource` keeps this generator. A reference to the loader would be a
    cycle: when Python collects it, PyTorch waits up to 5 s for each loader process.
    """
    for start, stop in spans:
        keys = pick_keys(order, start, stop)
        if seeds is not None:  # for `SeededSamples`
            keys = [((*seeds, start + n), key) for n, key in enumerate(keys)]
        if makes_batches:
            yield keys
        else:
            yield from keys


def _check_equal_bits(name: str, source: BatchSource) -> None:
    is_split = isinstance(source, MapStyleSource) and source.loader.batch_size is not None
    if not is_split or source.loader.collate_fn is collate_samples:
        raise ValueError(
            f'register_data({name}_loader=...): exact="bits" needs a DataLoader with a '
            "batch_size and a map-style data set, which raysgd can divide among logical workers, "
            f"but it is {source.describe()}."
        )


def wrap_loader(
    loader: Any,
    *,
    partitions: bool,
    layout: StepLayout = BY_WORKERS,
    **partition_arguments: Any,
) -> BatchSource:
    """Return the batch source of a registered loader, or of a `raysgd.data.Dataset`.

    `partitions` is ``add_dist_sampler`` of the trainer. Loaders with PyTorch's DistributedSampler
    are partitioned even if it is False. `partition_arguments` has the seed and the arguments of
    `PartitionedSource`.
    """
    if isinstance(records := getattr(loader, "dataset", loader), Records):
        raise TypeError(
            f"{records!r} has records, not samples. Pass DataLoader(Stream(records), "
            "batch_size=...), with raysgd.data.Stream."
        )
    members = getattr(loader, "flattened", loader)  # of a CombinedLoader of Lightning
    members = list(members.values()) if isinstance(members, Mapping) else members
    if isinstance(members, list | tuple) and any(isinstance(m, DataLoader) for m in members):
        raise TypeError(
            f"A {type(loader).__name__} of {len(members)} loaders cannot be trained on. Pass "
            "one loader, and join data sets with torch.utils.data.ConcatDataset. To validate on "
            "several data sets, call trainer.test(loader) for each."
        )
    yields_samples = isinstance(loader, torch.Tensor | Dataset | NumberedSamples)
    if yields_samples and not isinstance(loader, IterableDataset):
        raise TypeError(
            f"A {type(loader).__name__} yields samples, not batches. Pass a loader: "
            "torch.utils.data.DataLoader(data, batch_size=...)."
        )
    if isinstance(loader, ItemDataset):
        loader = DataLoader(loader, loader.batch_size, collate_fn=collate_samples)  # type: ignore[arg-type]
    loader = without_states(loader)
    may_partition = partitions and size_and_rank_of(loader) is None
    whole = unpartition(loader) if isinstance(loader, DataLoader) else loader
    why = why_not_partitioned(whole)
    if (may_partition or is_distributed(whole)) and not why:
        return MapStyleSource(whole, layout=layout, **partition_arguments)
    # Iterable data has no logical workers, which `_check_equal_bits` reports.
    if may_partition and not is_read_once(loader) and not layout.has_logical_workers:
        return IterableSource(loader, layout=layout, **partition_arguments)
    has_length = known_length(loader) is not None
    return BatchSource(loader, has_length, user_selects=not partitions, why_not_partitioned=why)


def _content_of(dataset: Any) -> str:
    """Describe the data. Different subsets and tensors get different texts."""
    if isinstance(dataset, Subset):
        indices: Any = dataset.indices
        keys = indices.tolist() if hasattr(indices, "tolist") else indices
        return f"subset {_digest(keys)} of {_content_of(dataset.dataset)}"
    if type(dataset) is TensorDataset:
        ends = [(tensor[0], tensor[-1]) for tensor in dataset.tensors if len(tensor)]
        return f"tensors {_digest(ends)}"
    return repr(dataset) if isinstance(dataset, NumberedSamples) else type(dataset).__name__


def _digest(content: Any) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:8]


def why_not_partitioned(loader: Any) -> str:
    """Return why a loader cannot be partitioned, or an empty string if it can."""
    if is_read_once(loader):
        return "an iterator can be read only once"
    if not isinstance(loader, DataLoader):
        return "it is not a torch.utils.data.DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return f"its data set, a {type(loader.dataset).__name__}, is an IterableDataset"
    if type(loader).__iter__ is not DataLoader.__iter__:
        return f"its class, {type(loader).__name__}, overrides __iter__"
    sampler = sampler_of(loader)
    if length_of(sampler) is None:
        return f"its sampler, a {type(sampler).__name__}, has no length"
    return ""


def _only_collates_tensors(loader: DataLoader[Any]) -> bool:
    """Return whether a loader only collates the rows of a TensorDataset.

    Indexing the tensors for a whole batch is many times faster than reading sample by sample.
    """
    data: Any = loader.dataset
    is_plain = type(loader) is DataLoader and type(data) is TensorDataset
    reads_in_process = loader.num_workers == 0 and not loader.pin_memory
    only_collates = is_plain and reads_in_process and loader.collate_fn is default_collate
    return only_collates and all(tensor.layout is torch.strided for tensor in data.tensors)
