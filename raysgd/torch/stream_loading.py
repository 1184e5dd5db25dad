"""Partition streams: data that can only be read in order.

Every worker reads the whole stream, and trains on its part of each step. The workers compare a
digest of the samples, so a stream that gives them different samples is an error.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.metadata
import io
import itertools
import os
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, get_worker_info

from raysgd._internal.versions import is_at_least
from raysgd.data.partition import EpochPartition, UpdatePlan, plan_update
from raysgd.data.source import PartitionedSource
from raysgd.data.stream import NumberedSamples, check_files, file_stamps
from raysgd.torch.batches import map_batch
from raysgd.torch.orders import seeded

_END = "end"
_SCALARS = {int, float, bool, str, bytes, type(None)}


class Chunk(NamedTuple):
    """Consecutive samples of one loader process."""

    process: int
    number: int  # chunks of the process so far, with this one
    samples: list[Any]
    digests: list[int]
    state: Any  # of the data set after this chunk; None if it has none


class Chunks(IterableDataset[Chunk]):
    """Reads a data set in chunks of `size` samples, in this process or in loader processes.

    Seeds the global random number generators for each chunk, so that random transforms depend on
    the position only. `starts` has the number of chunks and the state of each process, and `turn`
    is the process to begin with.
    """

    def __init__(
        self, dataset: Any, size: int, seed: int, starts: Sequence[tuple[int, Any]], turn: int
    ) -> None:
        self.dataset, self._size, self._seed = dataset, size, seed
        self._starts, self._turn = starts, turn

    def __iter__(self) -> Iterator[Chunk]:
        info = get_worker_info()
        process = 0 if info is None else info.id
        number, state = self._starts[process]
        if isinstance(state, str) and state == _END:
            return
        if process < self._turn:
            yield Chunk(process, number, [], [], state)  # loader processes take turns
        if can_jump(self.dataset):
            self.dataset.load_state_dict(state)  # None discards an earlier state
        iterator, samples = None, [None] * self._size
        while len(samples) == self._size:
            with seeded(hash((self._seed, process, number)) % 2**62), in_group_of_one():
                iterator = iter(self.dataset) if iterator is None else iterator
                samples = list(itertools.islice(iterator, self._size))
            number += 1
            state = None
            if can_jump(self.dataset):
                ended = len(samples) < self._size
                state = _END if ended else copy.deepcopy(self.dataset.state_dict())
            found = [digest(sample) for sample in samples]
            yield Chunk(process, number, samples if info is None else _pack(samples), found, state)


class StreamSource(PartitionedSource):
    """A stream, read by every worker.

    The samples of a DataLoader over an IterableDataset are partitioned. For any other loader, each
    item is a ready batch, and the workers take turns.

    `order_batch` is the batch size that determines the order of the samples of several loader
    processes. It does not depend on the number of workers.
    """

    reads_everything = True
    order_sampler = None

    def __init__(
        self,
        loader: Any,
        *,
        training: bool,
        world_size: int,
        rank: int,
        seed: int,
        batch_share: int | None = None,
        full_size: int | None = None,
        global_batch: int | None = None,
        order_batch: int | None = None,
    ) -> None:
        self._joins = has_samples(loader)
        size = loader.batch_size if self._joins else 1
        follows_share = self._joins and batch_share is not None and size == batch_share
        self._order_batch = order_batch
        if follows_share and full_size is not None and global_batch is not None:
            size = global_batch // full_size
        shard = EpochPartition(
            0,
            size,
            world_size,
            rank,
            drop_last=self._joins and bool(loader.drop_last),
            even=training,
            full_size=full_size if self._joins else None,
        )
        super().__init__(loader, shard, follows_share, global_batch if training else None)
        self.knows_sizes = self._joins
        self.shuffles = isinstance(self._dataset, NumberedSamples) and self._dataset.shuffles
        self._length = _length_of(loader)
        self._saved: Mapping[str, Any] = {}
        self._seed = seed
        self.close_workers()

    def set_batch_size(self, size: int, follows_share: bool) -> None:
        super().set_batch_size(size, follows_share)
        self._chunk_size = self._order_batch if follows_share and self._order_batch else size

    @property
    def _dataset(self) -> Any:
        return self.loader.dataset if self._joins else self.loader

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"{self.describe()} has no length.")
        return replace(self._shard, total=self._length).num_batches()

    def __iter__(self) -> Iterator[Any]:
        apart = copy.copy(self)
        apart.close_workers()
        for batch in apart.batches(self.current_epoch or 0, 0):
            yield batch
            apart._trim(apart._unit[0])

    # ---- batches

    def batches(
        self, epoch: int, offset: int, num_steps: int | None = None, in_parts: bool = False
    ) -> Iterator[Any]:
        self._go_to(epoch, offset)
        shard = self._shard
        unit = shard.stride if shard.even else shard.batch_size
        turns = 1 if shard.even else shard.world_size
        self._steps_read = 0
        for number in itertools.count() if num_steps is None else range(num_steps * turns):
            self._unit = offset, size = offset, self._available(offset, unit)
            if size == 0 or (shard.drop_last and size < unit):
                return
            self._steps_read = number // turns + 1
            if shard.even:
                step = replace(shard, total=size, drop_last=False)
                for start, stop in step.batches(0, None, in_parts):
                    yield self._batch(offset + start, offset + stop)
            else:
                if number % turns == shard.rank:
                    yield self._batch(offset, offset + size)
                self._trim(offset + size)
            offset += size

    def _batch(self, start: int, stop: int) -> Any:
        items = self._items[start - self._first : stop - self._first]
        samples = [pickle.loads(i) if isinstance(i, _Packed) else i for i, _ in items]
        if not self._joins:
            self.num_drawn = None
            return samples[0]
        self.num_drawn = stop - start
        batch = self.loader.collate_fn(samples)
        if self.loader.pin_memory and torch.cuda.is_available():
            return map_batch(
                batch, lambda leaf: leaf.pin_memory() if torch.is_tensor(leaf) else leaf
            )
        return batch

    def plan(self, offset: int, num_steps: int, in_parts: bool) -> UpdatePlan:
        self._trim(offset)
        shard = self._shard
        starts = range(offset, offset + num_steps * shard.stride, shard.stride)
        sizes = [self._available(start, shard.stride) for start in starts]
        least = shard.stride if shard.drop_last else 1
        return plan_update(
            tuple(size for size in sizes if size >= least),
            shard.world_size,
            shard.rank,
            shard.max_rows,
            in_parts,
            shard.weights,
        )

    def batch_positions(self) -> Iterator[int]:
        return itertools.count(self._shard.rank, self._shard.world_size)

    def steps_left(self, offset: int) -> int | None:  # type: ignore[override]
        if self._length is None:
            return None
        return replace(self._shard, total=self._length).num_steps(offset)

    def offset_after(self, offset: int, num_steps: int) -> int:
        end = offset + num_steps * self._shard.stride
        return min(end, self._first + len(self._items)) if self._has_ended else end

    def steps_taken(self, count: int) -> int:
        return self._steps_read

    # ---- the position

    def position(self, epoch: int, offset: int) -> Mapping[str, Any]:
        if offset == 0:
            return {}
        if self._reading != (epoch, self._seed) or not self._holds(offset):
            return self._saved if self._saved.get("at") == [epoch, offset] else {}
        files = file_stamps(self._dataset)
        marks = [mark for mark in self._marks if mark["offset"] <= offset]
        mark = {"mark": marks[-1]} if marks else {}
        return {"at": [epoch, offset], "digest": self._digest_at(offset), **mark, **files}

    def check_position(self, position: Mapping[str, Any]) -> None:
        check_files(self._dataset, position)

    def move_to(self, position: Mapping[str, Any]) -> None:
        self._saved = position

    def step_digest(self) -> int | None:
        start, size = self._unit
        return (self._digest_at(start + size) << 24) + size

    def reseed(self, seed: int, own_seed: int | None = None) -> None:
        self._seed = seed

    def fingerprint(self) -> str:
        return f"a stream, {type(self._dataset).__name__}"

    def describe(self) -> str:
        what = f"{self.batch_size} samples" if self._joins else "one batch"
        return f"a stream, {type(self._dataset).__name__}, with {what} per worker and step"

    def describe_reading(self) -> str:
        again = (
            "where a checkpoint ends" if can_jump(self._dataset) else "at the start of the epoch"
        )
        return (
            f"{self.describe()}: every worker reads all samples, and uses its part. A resumed run "
            f"begins to read {again}"
        )

    # ---- reading

    def close_workers(self) -> None:
        self._reading: tuple[int, int] | None = None  # epoch and seed
        self._chunks: Iterator[Chunk] = iter(())
        self._has_ended = False
        self._items: list[tuple[Any, int]] = []  # with the digest of the stream up to each
        self._first = self._digest = 0  # number of earlier samples, and their digest
        self._marks: list[dict[str, Any]] = []  # where reading can begin again
        self._unit = 0, 0  # start and size of the newest step
        self._steps_read = 0

    def _holds(self, offset: int) -> bool:
        return self._first <= offset <= self._first + len(self._items)

    def _go_to(self, epoch: int, offset: int) -> None:
        if self._reading != (epoch, self._seed) or not self._holds(offset):
            self._open(epoch, offset)
        while self._first + len(self._items) < offset and not self._has_ended:
            self._trim(self._first + len(self._items))
            self._read_chunk()
        is_known = self._saved.get("at") == [epoch, offset]
        if not self._holds(offset) or (
            is_known and self._saved["digest"] != self._digest_at(offset)
        ):
            raise RuntimeError(
                f"Training cannot continue in epoch {epoch} after {offset} samples, because the "
                f"stream, {type(self._dataset).__name__}, now gives other samples. It must give "
                "the same samples in each iteration of an epoch: seed its shuffles, and do not "
                "change its files. Otherwise, continue from a checkpoint of the end of an epoch."
            )
        self._trim(offset)

    def _open(self, epoch: int, offset: int) -> None:
        self.close_workers()
        for each in (self.loader, *(getattr(self.loader, n, None) for n in ("dataset", "sampler"))):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)
        num_processes = self.loader.num_workers if self._joins else 0
        starts: list[tuple[int, Any]] = [(0, None)] * max(1, num_processes)
        mark = self._saved.get("mark", {})
        at = self._saved.get("at", [None, 0])
        fits = at[0] == epoch and at[1] <= offset and len(mark.get("states", ())) == len(starts)
        if mark and fits and can_jump(self._dataset):
            starts = [tuple(each) for each in mark["states"]]
            self._first, self._digest = mark["offset"], mark["digest"]
            self._marks = [mark]
        else:
            mark = {"turn": 0}
        self._states = starts
        seed = self._seed + epoch
        chunks: Any = Chunks(self._dataset, self._chunk_size, seed, starts, mark["turn"])
        if num_processes:
            chunks = _reader(self.loader, chunks, seed)
        elif isinstance(self.loader, DataLoader):
            self.loader.generator = torch.Generator().manual_seed(seed)
        self._chunks = iter(chunks)
        self._reading = epoch, self._seed

    def _available(self, start: int, size: int) -> int:
        """Read on if necessary, and return how many of `size` samples from `start` there are."""
        while self._first + len(self._items) < start + size and not self._has_ended:
            self._read_chunk()
        return max(0, min(size, self._first + len(self._items) - start))

    def _read_chunk(self) -> None:
        try:
            chunk = next(self._chunks, None)
        except BaseException:
            if self._reading is not None:
                self._saved = self.position(self._reading[0], self._first)
            self.close_workers()  # a generator that has raised looks like one that has ended
            raise
        if chunk is None:
            self._has_ended = True
            return
        value = self._digest_at(self._first + len(self._items))
        for sample, of_sample in zip(chunk.samples, chunk.digests, strict=True):
            value = zlib.crc32(of_sample.to_bytes(4, "little"), value)
            self._items.append((sample, value))
        self._states[chunk.process] = (chunk.number, chunk.state)
        if chunk.state is not None:
            self._marks.append(
                {
                    "offset": self._first + len(self._items),
                    "digest": value,
                    "states": [list(each) for each in self._states],
                    "turn": (chunk.process + 1) % len(self._states),
                }
            )

    def _digest_at(self, offset: int) -> int:
        index = offset - self._first - 1
        return self._items[index][1] if index >= 0 else self._digest

    def _trim(self, offset: int) -> None:
        """Release the samples before `offset`."""
        self._digest = self._digest_at(offset)
        del self._items[: offset - self._first]
        self._first = offset
        passed = sum(mark["offset"] <= offset for mark in self._marks)
        del self._marks[: max(0, passed - 1)]


@contextlib.contextmanager
def in_group_of_one() -> Iterator[None]:
    """Set the variables by which WebDataset and others select the samples of a worker."""
    own = {"RANK": "0", "WORLD_SIZE": "1"}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def has_samples(loader: Any) -> bool:
    """Return whether a DataLoader collates batches from the samples of an IterableDataset."""
    return (
        isinstance(loader, DataLoader)
        and isinstance(loader.dataset, IterableDataset)
        and type(loader).__iter__ is DataLoader.__iter__
        and loader.batch_size is not None
        and type(loader.batch_sampler) is BatchSampler
    )


def can_jump(dataset: Any) -> bool:
    """Return whether reading can continue from a state of the data set, with the same samples."""
    if type(dataset).__module__.startswith("datasets."):
        # Before datasets 5.0.1, the states of filtered and mapped streams lose samples. No version
        # saves the content of a shuffle buffer, or of a batch of a table.
        is_exact = is_at_least(importlib.metadata.version("datasets"), "5.0.1")
        is_table = getattr(getattr(dataset, "_formatting", None), "is_table", False)
        return is_exact and not is_table and not _has_buffer(getattr(dataset, "_ex_iterable", None))
    return getattr(dataset, "is_resumable", False)


def _has_buffer(examples: Any) -> bool:
    inner = [
        getattr(examples, "ex_iterable", None),
        *(getattr(examples, "ex_iterables", None) or ()),
    ]
    name = type(examples).__name__
    return "BufferShuffled" in name or any(_has_buffer(i) for i in inner if i is not None)


def _length_of(loader: Any) -> int | None:
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        return None  # PyTorch can only guess it
    try:
        return len(loader)
    except (NotImplementedError, TypeError):
        return None


def _reader(loader: DataLoader[Any], chunks: Chunks, seed: int) -> DataLoader[Any]:
    """Return a copy of a loader whose processes read `chunks`."""
    made = copy.copy(loader)
    settings = {
        "dataset": chunks,
        "batch_size": None,
        "batch_sampler": None,
        "drop_last": False,
        "collate_fn": _same,
        "pin_memory": False,
        "persistent_workers": False,
        "generator": torch.Generator().manual_seed(seed),
        "worker_init_fn": functools.partial(_init, loader.worker_init_fn),
        "_iterator": None,
    }
    for name, value in settings.items():
        object.__setattr__(made, name, value)  # bypass the guards of DataLoader
    return made


def _same(item: Any) -> Any:
    return item


def _init(user_function: Callable[[int], None] | None, process: int) -> None:
    info: Any = get_worker_info()
    # User code expects its own data set.
    object.__setattr__(info, "dataset", info.dataset.dataset)
    if user_function is not None:
        user_function(process)


# ---- samples


class _Packed(bytes):
    """A pickled sample."""


class _Pickler(pickle.Pickler):
    """Copies tensors. A loader process would otherwise open a file for each tensor."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and value.device.type == "cpu" and not value.requires_grad:
            try:
                return torch.from_numpy, (value.numpy(),)
            except (TypeError, RuntimeError):  # such as bfloat16
                pass
        return NotImplemented


def _pack(samples: list[Any]) -> list[_Packed]:
    packed = []
    for sample in samples:
        file = io.BytesIO()
        _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(sample)
        packed.append(_Packed(file.getbuffer()))
    return packed


def digest(value: Any, before: int = 0, in_object: bool = False) -> int:
    """Return a checksum of a sample that is equal in all processes.

    Of an object of another class, it has the name of the class, and the attributes in `__dict__`.
    Of objects in its attributes, it has only the class, because they may refer to each other.
    """
    kind = type(value)
    if kind is str:
        return zlib.crc32(value.encode(errors="surrogatepass"), before)
    if kind is bytes or kind is bytearray:
        return zlib.crc32(value, before)
    if kind in _SCALARS:
        return zlib.crc32(repr(value).encode(), before)
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        before = zlib.crc32(repr(value.shape).encode(), before)
        return zlib.crc32(flat.view(torch.uint8).numpy().tobytes() if len(flat) else b"", before)
    if isinstance(value, Mapping):
        for key, item in value.items():
            before = digest(item, digest(key, before), in_object)
        return before
    if isinstance(value, list | tuple):
        if _SCALARS.issuperset(map(type, value)):
            return zlib.crc32(repr(value).encode(errors="surrogatepass"), before)
        for item in value:
            before = digest(item, before, in_object)
        return before
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        return zlib.crc32(value.tobytes(), zlib.crc32(repr(value.shape).encode(), before))
    if hasattr(value, "tobytes"):  # such as an image
        return zlib.crc32(value.tobytes(), before)
    before = zlib.crc32(kind.__qualname__.encode(), before)
    return before if in_object else digest(getattr(value, "__dict__", {}), before, in_object=True)
