"""Read the samples of iterable data in chunks, here or in loader processes, with digests."""

import contextlib
import copy
import io
import itertools
import os
import pickle
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from raysgd._internal.versions import is_at_least
from raysgd.data.source import iterate_once
from raysgd.data.stream import NumberedSamples, UnsizedStream
from raysgd.errors import CheckpointError
from raysgd.loop.sources import GeneratorFunction
from raysgd.torch.input.loader_copies import clone, with_dataset
from raysgd.torch.input.orders import seed_all, seeding
from raysgd.torch.tensors import as_bytes

IterableDataset.register(UnsizedStream)  # for one that was created before PyTorch was imported
_END = "end"
_SCALARS = {int, float, bool, str, bytes, type(None)}


class Chunk(NamedTuple):
    """Consecutive samples of one loader process."""

    process: int
    num_chunks: int  # chunks of the process so far, with this one
    samples: list[Any]
    digests: list[int]
    state: Any  # of the data set after this chunk; None if it has none


class ChunkDataset(IterableDataset[Chunk]):
    """Reads a data set in chunks of `size` samples, in this process or in loader processes.

    Seeds the global random number generators for each chunk, and within an `UnsizedStream`, so that
    random transforms depend on the position only. Reading begins at a mark of a `SampleBuffer`.
    """

    def __init__(self, dataset: Any, size: int, seed: int, mark: Mapping[str, Any]) -> None:
        self.dataset, self._size, self._seed, self._mark = dataset, size, seed, mark

    def __iter__(self) -> Iterator[Chunk]:
        info = get_worker_info()
        process = 0 if info is None else info.id
        num_chunks, state = self._mark["states"][process]
        if isinstance(state, str) and state == _END:
            return
        if process < self._mark["turn"]:
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
            digests = [sample_digest(sample) for sample in samples]
            content = samples if info is None else _pack(samples)
            yield Chunk(process, num_chunks, content, digests, state)

    def _begin(self, state: Any) -> Iterator[Any]:
        data: Any = self.dataset
        try:
            if isinstance(data, UnsizedStream):
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


def start_of_epoch(num_processes: int) -> dict[str, Any]:
    """Return the mark at the start of an epoch that a number of processes read."""
    return {"offset": 0, "digest": 0, "states": [[0, None]] * num_processes, "turn": 0}


class SampleBuffer:
    """The samples that have been read from an offset on, until `trim` releases them.

    Reading can begin at a mark. It has an offset, the digest of the samples up to there, the number
    of chunks and the state of each loader process, and which process has the next chunk.
    """

    def __init__(self, chunks: Iterable[Chunk], mark: Mapping[str, Any]) -> None:
        self._chunks, self._marks = iter(chunks), [mark]
        self._states = list(mark["states"])
        self.has_ended = self._is_closed = False
        self.start: int = mark["offset"]
        self._samples: list[Any] = []
        self._digests: list[int] = [mark["digest"]]  # of what precedes each sample, and the end

    @property
    def end(self) -> int:
        return self.start + len(self._digests) - 1

    def knows(self, offset: int) -> bool:
        """Return whether the digest at an offset is known."""
        return self.start <= offset <= self.end

    def holds(self, offset: int) -> bool:
        return self.knows(offset) and not self._is_closed

    def close(self) -> None:
        """Release the samples, and what reads them. The digests and marks stay."""
        self._chunks, self._samples, self._is_closed = iter(()), [], True

    def samples(self, start: int, stop: int) -> list[Any]:
        samples = self._samples[start - self.start : stop - self.start]
        return [pickle.loads(s) if isinstance(s, _Packed) else s for s in samples]

    def read_to(self, start: int, size: int) -> int:
        """Read on if necessary, and return how many of `size` samples from `start` there are."""
        while self.end < start + size and not self.has_ended:
            if (chunk := next(self._chunks, None)) is None:
                self.has_ended = True
            else:
                self._add(chunk)
        return max(0, min(size, self.end - start))

    def _add(self, chunk: Chunk) -> None:
        self._samples += chunk.samples
        for digest in chunk.digests:
            self._digests.append(zlib.crc32(digest.to_bytes(4, "little"), self._digests[-1]))
        self._states[chunk.process] = [chunk.num_chunks, chunk.state]
        if chunk.state is not None:
            mark = {"offset": self.end, "digest": self._digests[-1], "states": [*self._states]}
            self._marks.append(mark | {"turn": (chunk.process + 1) % len(self._states)})

    def digest_at(self, offset: int) -> int:
        return self._digests[max(0, offset - self.start)]

    def mark_before(self, offset: int) -> Mapping[str, Any]:
        return next(mark for mark in reversed(self._marks) if mark["offset"] <= offset)

    def trim(self, offset: int) -> None:
        """Release the samples before `offset`."""
        del self._samples[: offset - self.start], self._digests[: offset - self.start]
        self.start = offset
        num_passed = sum(mark["offset"] <= offset for mark in self._marks)
        del self._marks[: num_passed - 1]


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
        # A package of the user with this name has no version.
        version = getattr(sys.modules.get("datasets"), "__version__", "0")
        is_exact = is_at_least(version, "5.0.1")
        is_table = getattr(getattr(dataset, "_formatting", None), "is_table", False)
        return is_exact and not is_table and not _has_buffer(getattr(dataset, "_ex_iterable", None))
    return getattr(dataset, "is_resumable", False)


def _has_buffer(examples: Any) -> bool:
    several = getattr(examples, "ex_iterables", None) or ()
    inner = (getattr(examples, "ex_iterable", None), *several)
    name = type(examples).__name__
    return "BufferShuffled" in name or any(_has_buffer(i) for i in inner if i is not None)


def with_chunks(loader: DataLoader[Any], chunks: ChunkDataset, seed: int) -> DataLoader[Any]:
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


def sample_digest(value: Any, before: int = 0, in_object: bool = False) -> int:
    """Return a digest of a sample that is equal in all processes.

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
            before = sample_digest(item, sample_digest(key, before), in_object)
        return before
    if isinstance(value, list | tuple):
        if _SCALARS.issuperset(map(type, value)):
            return zlib.crc32(repr(value).encode(errors="surrogatepass"), before)
        for item in value:
            before = sample_digest(item, before, in_object)
        return before
    if isinstance(value, np.ndarray) and value.dtype.hasobject:  # its bytes are addresses
        return sample_digest(value.tolist(), before, in_object)
    if isinstance(value, np.ndarray | np.generic):
        return zlib.crc32(value.tobytes(), zlib.crc32(repr(value.shape).encode(), before))
    if hasattr(value, "tobytes"):  # such as an image
        return zlib.crc32(value.tobytes(), before)
    before = zlib.crc32(kind.__qualname__.encode(), before)
    attributes = {} if in_object else getattr(value, "__dict__", {})
    return sample_digest(attributes, before, in_object=True)
