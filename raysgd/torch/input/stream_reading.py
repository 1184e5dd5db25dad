"""Read the samples of a stream in chunks, here or in loader processes, with digests."""

import contextlib
import copy
import importlib.metadata
import io
import itertools
import os
import pickle
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from raysgd._internal.versions import is_at_least
from raysgd.comm.mesh import as_bytes
from raysgd.data.source import iterate_once
from raysgd.data.stream import GroupedStream, NumberedSamples
from raysgd.errors import CheckpointError
from raysgd.loop.sources import GeneratorFunction
from raysgd.torch.input.loader_copies import clone, with_dataset
from raysgd.torch.input.orders import seed_all, seeding

_END = "end"
_SCALARS = {int, float, bool, str, bytes, type(None)}


class Chunk(NamedTuple):
    """Consecutive samples of one loader process."""

    process: int
    num_chunks: int  # chunks of the process so far, with this one
    samples: list[Any]
    digests: list[int]
    state: Any  # of the data set after this chunk; None if it has none


class Chunks(IterableDataset[Chunk]):
    """Reads a data set in chunks of `size` samples, in this process or in loader processes.

    Seeds the global random number generators for each chunk, and within a `GroupedStream`, so that
    random transforms depend on the position only. `starts` has the number of chunks and the state
    of each process, and `first` is the process to begin with.
    """

    def __init__(
        self, dataset: Any, size: int, seed: int, starts: Sequence[tuple[int, Any]], first: int
    ) -> None:
        self.dataset, self._size, self._seed = dataset, size, seed
        self._starts, self._first = starts, first

    def __iter__(self) -> Iterator[Chunk]:
        info = get_worker_info()
        process = 0 if info is None else info.id
        num_chunks, state = self._starts[process]
        if isinstance(state, str) and state == _END:
            return
        if process < self._first:
            yield Chunk(process, num_chunks, [], [], state)  # loader processes take turns
        if can_seek(self.dataset):
            self.dataset.load_state_dict(state)  # None discards an earlier state
        iterator, samples = None, [None] * self._size
        generator = getattr(self.dataset, "generator", None)  # of a user's DataLoader
        while len(samples) == self._size:
            own_seed = hash((self._seed, process, num_chunks)) % 2**62
            with seeding(own_seed, generator), in_group_of_one():
                iterator = self._begin(state) if iterator is None else iterator
                samples = list(itertools.islice(iterator, self._size))
            num_chunks += 1
            state = None
            if can_seek(self.dataset):
                ended = len(samples) < self._size
                state = _END if ended else copy.deepcopy(self.dataset.state_dict())
            digests = [checksum(sample) for sample in samples]
            content = samples if info is None else _pack(samples)
            yield Chunk(process, num_chunks, content, digests, state)

    def _begin(self, state: Any) -> Iterator[Any]:
        data: Any = self.dataset
        try:
            if isinstance(data, GroupedStream):
                data = data.iterate(lambda *position: seed_all(self._seed, *position))
            iterator = iterate_once(data)
            first = list(itertools.islice(iterator, 1))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            if state is None:
                raise
            raise CheckpointError(
                f"{name_of(self.dataset)} cannot continue from its state in the checkpoint: "
                f"{error!r}. If the stream has changed since, such as by another map(), use the "
                "same stream, or load a checkpoint of the end of an epoch."
            ) from error
        return itertools.chain(first, iterator)


class StreamBuffer:
    """The samples that have been read from an offset on, until `trim` releases them.

    Args:
        chunks: gives the next samples.
        starts: the number of chunks and the state of each loader process.
        mark: a mark, at which reading begins. None: the start of the epoch.
    """

    def __init__(
        self,
        chunks: Iterable[Chunk] = (),
        starts: Sequence[tuple[int, Any]] = (),
        mark: Mapping[str, Any] | None = None,
    ) -> None:
        self._chunks, self._states = iter(chunks), list(starts)
        self.has_ended = False
        self.start: int = 0 if mark is None else mark["offset"]
        self._items: list[tuple[Any, int]] = []  # with the digest of the stream up to each
        self._digest: int = 0 if mark is None else mark["digest"]
        self._marks = [] if mark is None else [mark]  # where reading can begin again

    @property
    def end(self) -> int:
        return self.start + len(self._items)

    def holds(self, offset: int) -> bool:
        return self.start <= offset <= self.end

    def samples(self, start: int, stop: int) -> list[Any]:
        items = self._items[start - self.start : stop - self.start]
        return [pickle.loads(each) if isinstance(each, _Packed) else each for each, _ in items]

    def read_to(self, start: int, size: int) -> int:
        """Read on if necessary, and return how many of `size` samples from `start` there are."""
        while self.end < start + size and not self.has_ended:
            self.read_chunk()
        return max(0, min(size, self.end - start))

    def skip_to(self, offset: int) -> None:
        while self.end < offset and not self.has_ended:
            self.trim(self.end)
            self.read_chunk()

    def read_chunk(self) -> None:
        if (chunk := next(self._chunks, None)) is None:
            self.has_ended = True
            return
        value = self.digest_at(self.end)
        for sample, of_sample in zip(chunk.samples, chunk.digests, strict=True):
            value = zlib.crc32(of_sample.to_bytes(4, "little"), value)
            self._items.append((sample, value))
        self._states[chunk.process] = (chunk.num_chunks, chunk.state)
        if chunk.state is not None:
            self._marks.append(
                {
                    "offset": self.end,
                    "digest": value,
                    "states": [list(each) for each in self._states],
                    "turn": (chunk.process + 1) % len(self._states),
                }
            )

    def digest_at(self, offset: int) -> int:
        index = offset - self.start - 1
        return self._items[index][1] if index >= 0 else self._digest

    def mark_before(self, offset: int) -> Mapping[str, Any] | None:
        return next((mark for mark in reversed(self._marks) if mark["offset"] <= offset), None)

    def trim(self, offset: int) -> None:
        """Release the samples before `offset`."""
        self._digest = self.digest_at(offset)
        del self._items[: offset - self.start]
        self.start = offset
        passed = sum(mark["offset"] <= offset for mark in self._marks)
        del self._marks[: max(0, passed - 1)]


def name_of(dataset: Any) -> str:
    is_own = isinstance(dataset, NumberedSamples | GeneratorFunction)
    return repr(dataset) if is_own else type(dataset).__name__


@contextlib.contextmanager
def in_group_of_one() -> Iterator[None]:
    """Set the variables by which WebDataset and others select the samples of a worker."""
    own = {"RANK": "0", "WORLD_SIZE": "1"}
    before = {name: os.environ[name] for name in own if name in os.environ}
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            del os.environ[name]
        os.environ.update(before)


def can_seek(dataset: Any) -> bool:
    """Return whether reading can continue from a state of the data set, with the same samples."""
    if type(dataset).__module__.startswith("datasets."):
        # Before datasets 5.0.1, the states of filtered and mapped streams lose samples. No version
        # saves the content of a shuffle buffer, or of a batch of a table.
        is_exact = is_at_least(importlib.metadata.version("datasets"), "5.0.1")
        is_table = getattr(getattr(dataset, "_formatting", None), "is_table", False)
        return is_exact and not is_table and not _has_buffer(getattr(dataset, "_ex_iterable", None))
    return getattr(dataset, "is_resumable", False)


def _has_buffer(examples: Any) -> bool:
    several = getattr(examples, "ex_iterables", None) or ()
    inner = (getattr(examples, "ex_iterable", None), *several)
    name = type(examples).__name__
    return "BufferShuffled" in name or any(_has_buffer(i) for i in inner if i is not None)


def with_chunks(loader: DataLoader[Any], chunks: Chunks, seed: int) -> DataLoader[Any]:
    """Return a copy of a loader whose processes read `chunks`."""
    return clone(
        with_dataset(loader, chunks),
        batch_size=None,
        batch_sampler=None,
        drop_last=False,
        collate_fn=_identity,
        pin_memory=False,
        persistent_workers=False,
        generator=torch.Generator().manual_seed(seed),
    )


def _identity(item: Any) -> Any:
    return item


# ---- samples


class _Packed(bytes):
    """A pickled sample."""


class _Pickler(pickle.Pickler):
    """Copies tensors. A loader process would otherwise open a file for each tensor."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and value.device.type == "cpu" and not value.requires_grad:
            with contextlib.suppress(TypeError, RuntimeError):  # such as bfloat16
                return torch.from_numpy, (value.numpy(),)
        return NotImplemented


def _pack(samples: list[Any]) -> list[_Packed]:
    packed = []
    for sample in samples:
        file = io.BytesIO()
        _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(sample)
        packed.append(_Packed(file.getbuffer()))
    return packed


def checksum(value: Any, before: int = 0, in_object: bool = False) -> int:
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
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested:
        before = zlib.crc32(repr(value.shape).encode(), before)
        return zlib.crc32(as_bytes(value.cpu()).numpy().tobytes(), before)
    if isinstance(value, Mapping):
        for key, item in value.items():
            before = checksum(item, checksum(key, before), in_object)
        return before
    if isinstance(value, list | tuple):
        if _SCALARS.issuperset(map(type, value)):
            return zlib.crc32(repr(value).encode(errors="surrogatepass"), before)
        for item in value:
            before = checksum(item, before, in_object)
        return before
    if isinstance(value, np.ndarray) and value.dtype.hasobject:  # its bytes are addresses
        return checksum(value.tolist(), before, in_object)
    if isinstance(value, np.ndarray | np.generic):
        return zlib.crc32(value.tobytes(), zlib.crc32(repr(value.shape).encode(), before))
    if hasattr(value, "tobytes"):  # such as an image
        return zlib.crc32(value.tobytes(), before)
    before = zlib.crc32(kind.__qualname__.encode(), before)
    return before if in_object else checksum(getattr(value, "__dict__", {}), before, in_object=True)
