"""Streams of numbered samples: shuffled in windows, transformed, and mixed.

The samples of an epoch have numbers. Sample `k` follows from the number, the epoch, and the seed
alone, so any worker reads any sample without the samples before it.
"""

from __future__ import annotations

import functools
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from raysgd._internal.arguments import as_int, check_flags, is_number
from raysgd.data.records import RecordError, Records
from raysgd.errors import CheckpointError

SampleKey = tuple[int, int]
"""Epoch and number of a sample."""

_READ_SIZE = 256
_MIX_SIZE = 1000  # samples in which each stream of a mix has its share
_CHUNKS_PER_WINDOW = 8


class SampleKeys:
    """The keys of the samples of an epoch, computed where they are read.

    Within each step of `step` samples from `offset` on, the samples of a part of the data follow
    each other, because a worker uses consecutive keys.
    """

    def __init__(self, data: NumberedSamples, epoch: int, offset: int = 0, step: int = 0) -> None:
        self._size, self._interleave = len(data), data.interleave if step else 1
        self._epoch, self._offset, self._step = epoch, offset, step

    def __getitem__(self, span: slice) -> list[SampleKey]:
        numbers: Sequence[int] = range(span.start, span.stop)
        if self._interleave > 1:
            skip = (span.start - self._offset) % self._step
            first, stop = span.start - skip, skip + len(numbers)
            end = min(first + -(-stop // self._step) * self._step, self._size)
            every = np.arange(first, end)
            order = np.lexsort((every % self._interleave, (every - first) // self._step))
            numbers = every[order][skip:stop].tolist()
        return [(self._epoch, number) for number in numbers]


class NumberedSamples(ABC):
    """A data set for a ``DataLoader`` whose order differs between epochs."""

    epoch = 0
    shuffles = False
    interleave = 1
    files: Sequence[Records]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, epoch: int, numbers: Sequence[int]) -> list[Any]:
        """Return the samples with these numbers in the order of an epoch."""

    @abstractmethod
    def locate(self, epoch: int, number: int) -> list[Any]:
        """Return the file of a sample, and the number of its record in the file, from 0."""

    @property
    @abstractmethod
    def settings(self) -> str:
        """The arguments that decide the samples of an epoch and their order."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of samples that are read by their numbers."""
        self.epoch = epoch

    def __getitems__(self, keys: Sequence[Any]) -> list[Any]:
        if keys and isinstance(keys[0], tuple):
            epochs, numbers = zip(*keys, strict=True)
            return self.read(epochs[0], numbers)
        return self.read(self.epoch, keys)

    def __getitem__(self, key: int | SampleKey) -> Any:
        known = key if isinstance(key, tuple) else range(len(self))[key]  # also raises IndexError
        return self.__getitems__([known])[0]

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), _READ_SIZE):
            yield from self.read(self.epoch, range(start, min(start + _READ_SIZE, len(self))))


class Stream(NumberedSamples):
    """Samples of files, for a ``DataLoader``.

    >>> from raysgd.data import Stream, text
    >>> stream = Stream(text("README.md"), transform=len)

    raysgd trains on each sample of an epoch once, on any number of workers, and each worker reads
    only its samples. A run continues at any position without reading the samples before it.

    Args:
        records: Files: the result of `jsonl`, `parquet`, `tar`, or `text`.
        transform: Converts a record into a sample, on the worker that trains on it.
        augment: Changes a sample at random. It gets the sample and a ``numpy.random.Generator``,
            whose seed is the number of the sample in its epoch.
        shuffle: Number of samples in a window, within which the order is random. The order of parts
            of the files is random too. 0 keeps the order of the files.
        interleave: Number of parts of the data that take turns in the order. With one part per
            worker, or a multiple, each worker decodes only the Parquet row groups of its parts. It
            saves nothing with `group_size`, `skip_broken`, and in a `mix`.
        seed: Determines the order of each epoch, and the random numbers of `augment`.
        group_size: Number of records that `transform` gets as a list. They are consecutive in the
            order that `shuffle` makes. `transform` then returns any number of samples, for example
            to pack texts or to drop records. Because the number of samples is unknown, every worker
            transforms all records.
        skip_broken: Skip records that cannot be decoded. A process counts its own in `num_skipped`.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __new__(
        cls, *_: Any, group_size: int | None = None, skip_broken: bool = False, **__: Any
    ) -> Any:
        has_length = group_size is None and not skip_broken
        if not (has_length or cls is Stream or issubclass(cls, UnsizedStream)):
            raise TypeError(
                f"{cls.__name__}(group_size={group_size!r}, skip_broken={skip_broken!r}): a "
                "subclass of Stream has neither. Create a Stream with a transform instead."
            )
        kind = UnsizedStream if cls is Stream and not has_length else cls
        torch = sys.modules.get("torch.utils.data")
        if torch is not None and kind is UnsizedStream:  # a DataLoader asks for the class
            torch.IterableDataset.register(kind)
        return object.__new__(kind)

    def __init__(
        self,
        records: Records,
        *,
        transform: Callable[[Any], Any] | None = None,
        augment: Callable[[Any, np.random.Generator], Any] | None = None,
        shuffle: int = 0,
        interleave: int = 1,
        seed: int = 0,
        group_size: int | None = None,
        skip_broken: bool = False,
    ) -> None:
        if not isinstance(records, Records):
            raise TypeError(
                f"Stream({records!r}): must be the result of jsonl(), parquet(), tar(), or text() "
                "of raysgd.data. raysgd also partitions other iterables. Register them directly."
            )
        check_flags("Stream", skip_broken=skip_broken)
        self._records, self._transform, self._augment = records, transform, augment
        self.files = [records]
        self._window_size = as_int("Stream", "shuffle", shuffle, 0)
        self.interleave = as_int("Stream", "interleave", interleave, 1)
        self._seed = as_int("Stream", "seed", seed, 0)
        self._has_groups, self._skips = group_size is not None, skip_broken
        self._group_size = as_int("Stream", "group_size", group_size if self._has_groups else 1, 1)
        self.shuffles = self._window_size > 1
        self.num_skipped = self._epoch_read = 0
        # Parts of the files that follow each other. Larger ones would mix less, and smaller ones
        # would decode the same row group more often.
        self._chunk_size = max(1, self._window_size // _CHUNKS_PER_WINDOW, records.block)
        rows = 2 * (self._window_size + records.block) if self.shuffles else records.block
        records.kept_rows = max(records.kept_rows, self.interleave * rows)  # of all streams
        records.in_order &= not self.shuffles

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        return f"Stream of {self._records!r}"

    @property
    def settings(self) -> str:
        group = self._group_size if self._has_groups else None  # as saved positions call it
        interleave = "" if self.interleave == 1 else f", interleave={self.interleave}"
        return (
            f"shuffle={self._window_size}, seed={self._seed}, group={group}, "
            f"skip_broken={self._skips}{interleave}"
        )

    def read(self, epoch: int, numbers: Sequence[int]) -> list[Any]:
        samples = self._read_records(epoch, numbers)
        if self._transform is not None:
            samples = list(map(self._transform, samples))
        pairs = zip(samples, numbers, strict=True)
        return [self._augment_one(sample, epoch, number) for sample, number in pairs]

    def _read_records(self, epoch: int, numbers: Sequence[int]) -> list[Any]:
        """Return the records that can be decoded, and count the others, or raise an error."""
        if epoch != self._epoch_read:
            self._epoch_read = epoch
            self._records.close()
        records = self._records.read(self._record_numbers(epoch, np.asarray(numbers, np.int64)))
        broken = [record for record in records if isinstance(record, RecordError)]
        if broken and not self._skips:
            raise broken[0]
        self.num_skipped += len(broken)
        return [record for record in records if not isinstance(record, RecordError)]

    def locate(self, epoch: int, number: int) -> list[Any]:
        return self._records.locate(self._record_numbers(epoch, np.array([number]))[0])

    def _augment_one(self, sample: Any, epoch: int, number: int) -> Any:
        if self._augment is None:
            return sample
        return self._augment(sample, np.random.default_rng((self._seed, epoch, number)))

    def _record_numbers(self, epoch: int, numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the numbers of records in the files."""
        size, stride = len(self._records), self.interleave
        if stride > 1:
            records = numbers % stride * (size // stride) + numbers // stride
            # The rest stays at the end.
            numbers = np.where(numbers < size // stride * stride, records, numbers)
        if not self.shuffles:
            return numbers
        positions = np.empty_like(numbers)
        windows = numbers // self._window_size
        for window in np.unique(windows).tolist():
            start, own = window * self._window_size, windows == window
            order = _permutation(min(self._window_size, size - start), self._seed, epoch, 1, window)
            positions[own] = start + order[numbers[own] - start]
        chunks, within = np.divmod(positions, self._chunk_size)
        moves = chunks < size // self._chunk_size  # the last one, if it is shorter, stays the last
        chunks[moves] = _permutation(size // self._chunk_size, self._seed, epoch, 0)[chunks[moves]]
        return chunks * self._chunk_size + within


@functools.lru_cache(maxsize=32)
def _permutation(size: int, *seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).permutation(size)


class UnsizedStream(Stream):
    """A `Stream` whose number of samples is unknown. Every worker reads all of it."""

    is_resumable = True
    """Whether reading can continue from a `state_dict`."""
    _state: dict[str, int] | None = None
    _start: Mapping[str, int] | None = None

    def __len__(self) -> int:
        raise TypeError("A Stream with group_size or skip_broken has no length before it is read.")

    def __iter__(self) -> Iterator[Any]:
        return self.iterate(lambda group, taken: None)

    def iterate(self, seed: Callable[[int, int], Any]) -> Iterator[Any]:
        """Iterate over the samples. Call `seed` with the position before `transform` of a group."""
        torch = sys.modules.get("torch.utils.data")
        info = None if torch is None else torch.get_worker_info()
        first, stride = (0, 1) if info is None else (info.id, info.num_workers)
        start, self._start = self._start or {"group": first, "taken": 0}, None
        skip, epoch = start["taken"], self.epoch
        for group in range(start["group"], -(-len(self._records) // self._group_size), stride):
            if self._has_groups:
                seed(group, 0)
            samples = self._samples(epoch, group)
            if not self._has_groups:  # do not transform the record again, or count it if broken
                self._state = {"group": group + stride, "taken": 0}
            for taken, sample in enumerate(samples):
                if taken >= skip:
                    if self._has_groups:
                        self._state = {"group": group, "taken": taken + 1}
                    yield self._augment_one(sample, epoch, (group << 24) + taken)
                if isinstance(samples, Iterator):
                    seed(group, taken + 1)
            skip = 0

    def _samples(self, epoch: int, group: int) -> Iterable[Any]:
        first, total = group * self._group_size, len(self._records)
        records = self._read_records(epoch, range(first, min(first + self._group_size, total)))
        if self._transform is None:
            return records
        return self._transform(records) if self._has_groups else [*map(self._transform, records)]

    def state_dict(self) -> dict[str, int] | None:
        """Return the position of an iteration: its group of records, and samples of the group."""
        return self._state

    def load_state_dict(self, state: Mapping[str, int] | None) -> None:
        """Begin the next iteration at a position."""
        self._state, self._start = None if state is None else dict(state), state


class mix(NumberedSamples):  # noqa: N801  users call it like a function
    """The samples of several streams, mixed by `weights`.

    Each sample appears once in an epoch. When a stream has no samples left, the others share its
    weight. The number of a sample determines its stream.

    >>> from raysgd.data import Stream, mix, text
    >>> readme = Stream(text("README.md"))
    >>> len(mix([readme, readme], [0.8, 0.2])) == 2 * len(readme)
    True
    """

    def __init__(
        self, streams: Sequence[Stream], weights: Sequence[float], *, seed: int = 0
    ) -> None:
        self._seed = as_int("mix", "seed", seed, 0)
        if not streams:
            raise ValueError(f"mix({streams!r}): needs at least one stream.")
        are_positive = all(is_number(weight) and 0 < weight < math.inf for weight in weights)
        if len(streams) != len(weights) or not are_positive:
            raise ValueError(
                f"mix(weights={list(weights)!r}): must be {len(streams)} positive numbers, one per "
                "stream."
            )
        for stream in streams:
            if not isinstance(stream, Stream) or isinstance(stream, UnsizedStream):
                raise TypeError(
                    f"mix() of {stream!r}: must be a Stream without group_size and skip_broken, "
                    "because the number of samples of the others is unknown."
                )
        self._streams, self._weights = list(streams), list(weights)
        self.files = [stream._records for stream in streams]
        self.shuffles = any(stream.shuffles for stream in streams)
        self._starts: list[int] = []  # numbers of samples at which the set of streams changes
        self._patterns: list[tuple[list[int], np.ndarray[Any, Any]]] = []
        self._find_ends(np.asarray(weights, float))

    def _find_ends(self, weights: np.ndarray[Any, Any]) -> None:
        """Find out where streams end. From there on, the others share their weight."""
        taken = [0] * len(self._streams)
        sizes = list(map(len, self._streams))
        while any(left := [size - n for size, n in zip(sizes, taken, strict=True)]):
            active = np.where(np.array(left) > 0, weights, 0.0)
            ideal = active / active.sum() * _MIX_SIZE
            counts = np.where(active > 0, np.maximum(1, np.floor(ideal)), 0).astype(int)
            pattern = np.repeat(np.arange(len(left)), counts)
            pattern = pattern[np.random.default_rng((self._seed, *taken)).permutation(len(pattern))]
            self._starts.append(sum(taken))
            self._patterns.append((taken, pattern))
            ends = []
            for stream in np.flatnonzero(counts):
                rounds, rest = divmod(left[stream] - 1, int(counts[stream]))
                ends.append(rounds * len(pattern) + np.flatnonzero(pattern == stream)[rest] + 1)
            taken = [n + _count_before(pattern, i, int(min(ends))) for i, n in enumerate(taken)]

    def __len__(self) -> int:
        return sum(map(len, self._streams))

    @property
    def settings(self) -> str:
        streams = "; ".join(stream.settings for stream in self._streams)
        return f"weights={self._weights}, seed={self._seed}, of {streams}"

    def __repr__(self) -> str:
        return f"mix of {len(self._streams)} streams with {len(self)} records"

    def read(self, epoch: int, numbers: Sequence[int]) -> list[Any]:
        positions = [self.locate_in_stream(number) for number in numbers]
        results: list[Any] = [None] * len(numbers)
        for which, stream in enumerate(self._streams):
            own = [i for i, (other, _) in enumerate(positions) if other == which]
            samples = stream.read(epoch, [positions[i][1] for i in own])
            for i, sample in zip(own, samples, strict=True):
                results[i] = sample
        return results

    def locate(self, epoch: int, number: int) -> list[Any]:
        which, own = self.locate_in_stream(number)
        return self._streams[which].locate(epoch, own)

    def locate_in_stream(self, number: int) -> tuple[int, int]:
        """Return which stream has a sample, and its number in that stream."""
        index = int(np.searchsorted(self._starts, number, side="right")) - 1
        taken, pattern = self._patterns[index]
        within = number - self._starts[index]
        stream = int(pattern[within % len(pattern)])
        return stream, taken[stream] + _count_before(pattern, stream, within)


def _count_before(pattern: np.ndarray[Any, Any], stream: int, number: int) -> int:
    rounds, rest = divmod(number, len(pattern))
    is_own = pattern == stream
    return int(rounds * is_own.sum() + is_own[:rest].sum())


def file_stamps(dataset: Any) -> dict[str, Any]:
    """Return what a checkpoint saves about the files of a data set and their order."""
    if not isinstance(dataset, NumberedSamples):
        return {}
    stamps = [stamp for records in dataset.files for stamp in records.stamps()]
    return {"files": stamps, "settings": dataset.settings}


def close_files(dataset: Any) -> None:
    if isinstance(dataset, NumberedSamples):
        for records in dataset.files:
            records.close()


def check_files(dataset: Any, info: Mapping[str, Any]) -> None:
    """Raise CheckpointError if files or settings differ from those of a saved `resume_info`."""
    stamps = file_stamps(dataset)
    settings = stamps.get("settings")
    if settings != info.get("settings", settings):
        raise CheckpointError(
            f"The stream differs from that of the checkpoint, which was saved within an epoch: "
            f"{info['settings']}, and now {settings}. Use the same arguments, or load a "
            "checkpoint of the end of an epoch."
        )
    saved, own = info.get("files"), stamps.get("files")
    if saved is None or own is None or saved == own:
        return
    paths = [path for records in dataset.files for path in records.paths]
    changed = [path for path, a, b in zip(paths, saved, own, strict=False) if a != b]
    what = changed[0] if changed else f"{len(own)} files instead of {len(saved)}"
    raise CheckpointError(
        f"The data has changed since the checkpoint was saved, within an epoch: {what}. Restore "
        "the files, with their modification times, or load a checkpoint of the end of an epoch."
    )
