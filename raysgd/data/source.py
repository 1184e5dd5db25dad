"""Sources of the batches of an epoch."""

import copy
import inspect
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from raysgd._internal.collectives import Collectives
from raysgd._internal.forwarding import forward_to
from raysgd.data.partition import BY_WORKERS, EpochPartition, MicroBatchPlan, StepLayout, UpdatePlan
from raysgd.data.stream import check_files
from raysgd.errors import CheckpointError

_KINDS = {"at": "a stream", "order": "a map-style data set", "length": "unpartitioned data"}
"""`BatchSource.data_kind` of a saved `resume_info`, by the first of these keys that it has."""


def iterate_once(iterable: Iterable[Any]) -> Iterator[Any]:
    """Yield the items of an iterable. Call its `__iter__` once, because it may begin again."""
    return (item for item in iterable)


def is_read_once(loader: Any) -> bool:
    """Return whether a loader is an iterator whose class has no `__iter__` that may begin again."""
    own: Any = getattr(type(loader), "__iter__", None)
    may_begin = inspect.isfunction(own) and own is not Iterator.__iter__
    return isinstance(loader, Iterator) and not may_begin


def length_of(loader: Any) -> int | None:
    """Return the length of a loader, or None if it has none, or only after its first batch."""
    try:
        return len(loader)
    except (TypeError, RuntimeError, ValueError, OverflowError):
        return None


def set_loader_epoch(loader: Any, epoch: int | None) -> Any:
    """Set the epoch of a loader, its data set, and its samplers, if given. Return the loader."""
    for each in _with_members(loader):
        if hasattr(each, "set_epoch") and epoch is not None:
            each.set_epoch(epoch)
    return loader


def size_and_rank_of(loader: Any) -> tuple[Any, Any] | None:
    """Return the world size and rank by which a loader selects its part, or None."""
    for each in _with_members(loader):
        if hasattr(each, "num_replicas"):  # as in PyTorch's DistributedSampler
            return each.num_replicas, getattr(each, "rank", None)
        # split_dataset_by_node of Hugging Face sets this private attribute.
        split: Any = getattr(each, "_distributed", None)
        if hasattr(split, "world_size"):
            return split.world_size, split.rank
    return None


def _with_members(loader: Any) -> list[Any]:
    own = [getattr(loader, name, None) for name in ("dataset", "sampler", "batch_sampler")]
    return [loader, *own, *(getattr(sampler, "sampler", None) for sampler in own[1:])]


@dataclass(slots=True, eq=False)
class SourceBatch:
    """A batch of `BatchSource.read`, and what the source knows of it."""

    content: Any
    num_collated_samples: int | None = None  # samples that the loader joined in it, if known
    group_step: int | None = None  # steps of the group since `read`; None: as on this worker
    plan: UpdatePlan | None = None  # of its step, if `BatchSource.plan` cannot know the sizes


class BatchSource:
    """A worker's view of a loader. This class does not partition it; subclasses do.

    An offset is a position in an epoch. In this class, an offset counts the batches of this worker.
    In a partitioned loader, it counts the samples of all workers, or the batches of a
    ``tf.data.Dataset``.
    """

    is_partitioned = False
    knows_sizes = False  # the number of samples of each batch is known
    shuffles = False  # the order of an epoch is known to be random
    own_seed: int | None = None  # seed of the loader's generator, if it has one
    global_batch_size: int | None = None  # samples per step, if raysgd partitions by samples
    epoch_samples = 0  # samples of an epoch of all workers, or 0 if unknown
    current_epoch: int | None = None  # the epoch in progress; None for validation data
    _agreed_epoch: int | None = None  # the newest of `agree_on_order`
    steps_read: int | None = None  # by the group since `read`; None: as many as this worker
    step_digest: Any = 0  # of the samples up to the newest step
    compares_samples = False  # the workers compare `step_digest` at each batch
    # For messages: the kind of the data, who reads the samples, and how one worker could read each.
    data_kind = "unpartitioned data"
    who_reads = "every worker reads and uses all of it"
    reading_advice = ""

    def __init__(
        self,
        loader: Any,
        has_length: bool = True,
        user_selects: bool = False,
        why_not_partitioned: str = "",
    ) -> None:
        self.loader = loader
        self.why_not_partitioned = why_not_partitioned
        if not self.is_partitioned and (user_selects or size_and_rank_of(loader) is not None):
            self.why_not_partitioned = ""
            self.who_reads = "your code selects the part of each worker"
        self._has_length = has_length and length_of(loader) is not None
        self._iteration: Any = None  # the newest over the loader, until `end_processes`
        self._stopped_at: tuple[int, int] | None = None  # epoch and offset, if it can continue
        self._given = 0, 0  # epoch of the newest batches that were read, and their number
        self.unread: Iterator[SourceBatch] | None = None  # the rest of an epoch, for a segment
        self._saved: Mapping[str, Any] = {}  # the newest `resume_info` that was loaded

    def __len__(self) -> int:
        """Return this worker's batches per epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this worker's batches of the current epoch, for loops in user code."""
        return iter(set_loader_epoch(self.loader, self.current_epoch))

    def __getattr__(self, name: str) -> Any:
        """Return attributes of the user's loader, such as ``dataset``."""
        if name == "loader":  # the attribute is missing while unpickling
            raise AttributeError(name)
        return getattr(self.loader, name)

    # ---- reading, also by the next segment of an epoch

    def give_back(self, batches: Iterable[SourceBatch]) -> None:
        """Read batches again. A partitioned source reads them by their offset."""
        if self.is_partitioned:
            self.discard_unread()
        elif self.unread is not None:
            self.unread = itertools.chain(batches, self.unread)

    def discard_unread(self) -> None:
        self.unread = None

    def batches(self, epoch: int, offset: int, num_steps: int | None = None) -> Iterator[Any]:
        """Iterate over the contents of `read`, for user code."""
        return (batch.content for batch in self.read(epoch, offset, num_steps))

    def read(self, epoch: int, offset: int, num_steps: int | None = None) -> Iterator[SourceBatch]:
        """Iterate over this worker's batches of `epoch` from `offset`.

        An unpartitioned loader reads and skips the batches before `offset`. An iterator that can be
        read only once skips those that it has not given yet.
        """
        iterator, stopped_at, self._stopped_at = self._iteration, self._stopped_at, None
        if offset == 0 or stopped_at != (epoch, offset):
            iterator = self._iteration = self._read_from(epoch, offset)
        yield from map(SourceBatch, itertools.islice(iterator, num_steps))
        if num_steps is None:
            return
        if self.steps_left(offset + num_steps) == 0:
            next(iterator, None)  # code of the loader after its last batch may matter
        self._stopped_at = epoch, offset + num_steps

    def _read_from(self, epoch: int, offset: int) -> Iterator[Any]:
        """Iterate over the loader from an offset, or over the rest of an iterator."""
        begins = epoch > self._given[0] or (offset == 0 and self.current_epoch is None)
        if begins or not is_read_once(self.loader):
            self._given = epoch, 0
        if self._given > (epoch, offset):
            raise RuntimeError(
                f"Reading cannot continue in epoch {epoch} after {offset} batches, because "
                f"{self.describe()} can be read only once, and has already given "
                f"{self._given[1]} batches of epoch {self._given[0]}. Register a loader that can "
                "be read again, such as a list, or load the state in a new trainer."
            )
        # An iterator that continues may restart in `set_epoch`.
        for batch in set_loader_epoch(self.loader, None if self._given[1] else epoch):
            self._given = epoch, self._given[1] + 1
            if self._given[1] > offset:
                yield batch

    def plan(self, offset: int, num_steps: int) -> UpdatePlan:
        """Return this worker's micro-batches in an update of `num_steps` steps."""
        return UpdatePlan(tuple(MicroBatchPlan(step_index=step) for step in range(num_steps)))

    def steps_left(self, offset: int) -> int | None:
        """Return the number of steps from `offset` to the end, or None if unknown."""
        return max(0, len(self.loader) - offset) if self._has_length else None

    def offset_after(self, offset: int, num_steps: int) -> int:
        return offset + num_steps

    def end_processes(self) -> None:
        """End the iteration, and stop the loader's processes. The next iteration starts others."""
        self.discard_unread()
        # PyTorch has no public way: it stops them with the iterator, which a traceback can keep.
        iteration, self._iteration, self._stopped_at = self._iteration, None, None
        stop = getattr(iteration, "_shutdown_workers", getattr(iteration, "close", None))
        if stop is not None:
            stop()

    def sample_ids(self, epoch: int, offset: int, num_samples: int) -> list[Any]:
        """Return the numbers of `num_samples` samples of an epoch from an offset."""
        return [*range(offset, offset + num_samples)]

    # ---- what continues an epoch, in addition to the offset

    def resume_info(self, epoch: int, offset: int) -> Mapping[str, Any]:
        """Return what identifies the data up to an offset, and where reading can begin again."""
        length = self._data_length if offset else None
        info = {} if length is None else {"epoch": epoch, "length": length}
        if offset and not self.is_partitioned and (batches := length_of(self.loader)) is not None:
            info["num_batches"] = batches  # of this worker
        return info

    def check_resume_info(self, info: Mapping[str, Any]) -> None:
        """Raise CheckpointError if the data is not that of a saved `resume_info`."""
        check_files(getattr(self.loader, "dataset", self.loader), info)
        kind = next((kind for key, kind in _KINDS.items() if key in info), self.data_kind)
        if kind != self.data_kind:
            raise CheckpointError(
                f"The checkpoint was saved within an epoch of {kind}, but the train loader has "
                f"{self.data_kind}. Use the same data, or load a checkpoint of the end of an epoch."
            )
        saved, own = info.get("length"), self._data_length
        if None not in (saved, own) and saved != own:
            raise CheckpointError(
                "The data has changed since the checkpoint was saved, within an epoch: its length "
                f"was {saved}, and is {own}. Use the same data and sampler, or load a checkpoint "
                "of the end of an epoch."
            )

    @property
    def _data_length(self) -> int | None:
        """Length of the data, if it does not depend on the number of workers."""
        return length_of(getattr(self.loader, "dataset", None))

    def load_resume_info(self, info: Mapping[str, Any]) -> None:
        """Continue from the `resume_info` of this or another worker."""
        self._saved = info

    # ---- agreement between the workers

    def agree_on_order(self, epoch: int, offset: int, collectives: Collectives) -> None:
        """Make all workers use one order of an epoch. Every rank calls it before `read`."""
        begins, self._agreed_epoch = not offset or epoch != self._agreed_epoch, epoch
        set_loader_epoch(self.loader, epoch if begins else None)  # the length may depend on it

    def check_same_samples(self, collectives: Collectives) -> None:
        """Raise RuntimeError if other workers have read other samples. Every rank must call it."""
        if not collectives.all_ranks_equal(self.step_digest):
            raise RuntimeError(
                f"The workers read different samples from {self.describe()}. Every worker must "
                "read the same samples in one order, and raysgd selects its part. Seed shuffles "
                "equally on all workers, and leave out deterministic=False. If the data selects "
                "the samples of its worker itself, pass add_dist_sampler=False to the trainer, or "
                "give it an attribute num_replicas."
            )

    def repartition(self, world_size: int, rank: int, worker_batch_size: int | None) -> None:
        """Partition the epoch again. `worker_batch_size`: the new ``config[BATCH_SIZE]``."""

    def change_partition(self, **fields: Any) -> None:
        """Set `shares`, up to a `repartition`, or `may_split`. A change ends the iteration."""

    def batching(self) -> tuple[int, bool] | None:
        """Return a worker's batch size, and whether it follows ``config[BATCH_SIZE]``."""
        return None

    def set_batch_size(self, size: int, follows_config: bool) -> None:
        """Apply the `batching` of another worker."""

    def reseed(self, seed: int, own_seed: int | None = None) -> None:
        """Derive the order of epochs from `seed`, or from `own_seed` for a loader's generator."""
        self._seed = seed

    def fingerprint(self) -> str:
        """Return a text that must be equal on all workers, to compare their data."""
        return ""

    def describe(self) -> str:
        """Describe the data for messages."""
        kind: Any = type(self.loader)
        if kind.__repr__ is not object.__repr__:
            return repr(self.loader)
        dataset = getattr(self.loader, "dataset", None)
        of = "" if dataset is None else f" of {type(dataset).__name__}"
        return f"{kind.__name__}{of}"


class PartitionedSource(BatchSource):
    """A loader of `epoch_size` items in batches of `size`, divided by an :class:`EpochPartition`.

    If `epoch_size` is None, it is unknown. If `size` is None, each item is a batch. A `layout` that
    `keeps_global_batch` makes the global batch size constant: `requested_global_batch_size`, if
    `size` is `worker_batch_size`.
    """

    is_partitioned = True
    knows_sizes = True
    who_reads = "each worker reads only its samples"

    def __init__(
        self,
        loader: Any,
        epoch_size: int | None,
        size: int | None,
        drop_last: bool,
        *,
        training: bool,
        world_size: int,
        rank: int,
        worker_batch_size: int | None = None,
        layout: StepLayout = BY_WORKERS,
        requested_global_batch_size: int | None = None,
    ) -> None:
        # The loader uses config[BATCH_SIZE], a part of the global batch.
        follows_config = size is not None and size == worker_batch_size
        self._has_samples = size is not None  # and not ready batches, which cannot grow
        layout = layout if self._has_samples else BY_WORKERS
        if follows_config and layout.keeps_global_batch and requested_global_batch_size is not None:
            size = requested_global_batch_size // layout.num_planned_workers(world_size)
        super().__init__(loader)
        self._epoch_size = epoch_size
        self._partition = EpochPartition(
            sys.maxsize if epoch_size is None else epoch_size,
            1 if size is None else size,
            world_size,
            rank,
            drop_last=drop_last,
            training=training,
            layout=layout,
        )
        self._requested_batch_size = requested_global_batch_size
        self.set_batch_size(self._partition.batch_size, follows_config)

    @property
    def partition(self) -> EpochPartition:
        """This worker's samples of an epoch, which has its current length."""
        newest, size = self._partition, self._current_size
        return newest if size in (None, newest.epoch_size) else replace(newest, epoch_size=size)

    _current_size: int | None = forward_to("_epoch_size", "Items of the current epoch, if known.")
    _data_length: int = forward_to("partition.epoch_size", "Items of an epoch of all workers.")
    batch_size: int = forward_to(
        "_partition.batch_size", "Samples of this worker per step in a group of full size."
    )
    global_batch_size: Any = property(
        lambda s: s._partition.global_batch_size if s._has_samples else None
    )
    epoch_samples: Any = property(lambda self: self.partition.end_index(0))

    def __len__(self) -> int:
        if self._epoch_size is None:
            raise TypeError(f"{self.describe()} has no length.")
        return self.partition.num_batches()

    def __iter__(self) -> Iterator[Any]:
        return self._copy_for_user().batches(self.current_epoch or 0, 0)

    def _copy_for_user(self) -> Self:
        """Return a copy for a loop in user code. An iteration in progress then continues."""
        copied = copy.copy(self)
        copied._iteration = None
        copied.change_partition(may_split=False)
        return copied

    def plan(self, offset: int, num_steps: int) -> UpdatePlan:
        partition = self._partition  # of the iteration in progress
        return partition.plan(tuple(partition.global_batch_sizes(offset, num_steps)))

    def steps_left(self, offset: int) -> int | None:
        return None if self._epoch_size is None else self.partition.num_steps(offset)

    def offset_after(self, offset: int, num_steps: int) -> int:
        return self._partition.offset_after(offset, num_steps)

    def repartition(self, world_size: int, rank: int, worker_batch_size: int | None) -> None:
        self.discard_unread()
        self._partition = replace(self._partition, world_size=world_size, rank=rank, shares=None)
        keeps_size = self._partition.layout.keeps_global_batch
        if self._follows_config and worker_batch_size is not None and not keeps_size:
            self.set_batch_size(worker_batch_size, follows_config=True)

    def change_partition(self, **fields: Any) -> None:
        if any(getattr(self._partition, name) != value for name, value in fields.items()):
            self._partition = replace(self._partition, **fields)
            self.discard_unread()

    def batching(self) -> tuple[int, bool] | None:
        return self._partition.batch_size, self._follows_config

    def set_batch_size(self, size: int, follows_config: bool) -> None:
        partition = self._partition
        keeps_size = partition.training and partition.layout.keeps_global_batch
        requested = self._requested_batch_size if follows_config and keeps_size else None
        self._partition = replace(partition, batch_size=size, requested_global_batch_size=requested)
        self._follows_config = follows_config

    def describe(self) -> str:
        partition = self.partition
        size = f"{partition.epoch_size} samples, batch size {partition.batch_size}"
        return f"{size} on each of {partition.num_planned_workers} workers"
