"""Numbered records of files: JSON lines, text, and tar archives.

An index of each file is built once and kept in a cache folder, so that any record can be read
without the records before it. Compressed files are decompressed once into that folder.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import io
import itertools
import json
import lzma
import os
import shutil
import tarfile
import time
import zlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import numpy as np
from fsspec.core import url_to_fs
from fsspec.utils import infer_compression

from raysgd._internal.arguments import unknown_argument
from raysgd._internal.files import replacing

T = TypeVar("T")

_BLOCK_BYTES = 4 * 2**20
_NUM_BLOCKS = 32  # of a remote file in memory
_NUM_TRIES = 4
_NUM_OPEN = 16
_BAD_CONTENT = EOFError, ValueError, gzip.BadGzipFile, lzma.LZMAError, tarfile.TarError, zlib.error
_PERMANENT = (
    *(FileNotFoundError, PermissionError, IsADirectoryError, ImportError, RuntimeError, TypeError),
    *_BAD_CONTENT,
)


class RecordError(ValueError):
    """A record or a file that cannot be decoded.

    It replaces a broken record until a caller skips it, or raises it.
    """


class Records(ABC):
    """The records of files, in order. Subclasses read one format.

    Args:
        paths: Path or URL with wildcards, or a list of them. fsspec opens all but local files.
            Files that match a wildcard are sorted by name.
        cache_dir: Folder of indexes and decompressed files. The default is ``~/.cache/raysgd``.
        storage_options: Arguments of the fsspec file system, such as credentials.

    Raises:
        FileNotFoundError: If no file matches one of `paths`, or `paths` is empty.
        TypeError: If local files get `storage_options`.
    """

    block = 1  # records that are decoded together
    unit = "record"  # for messages

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        cache_dir: str | os.PathLike[str] | None = None,
        **storage_options: Any,
    ) -> None:
        path_list = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
        if not path_list:
            raise FileNotFoundError(f"{type(self).__name__}({paths!r}): needs at least one path.")
        cache = cache_dir or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "raysgd")
        self._cache = Path(cache).expanduser()
        self.paths: list[str] = []
        self._stamps: list[str] = []
        for each in path_list:
            path = os.fspath(each)
            fs, pattern = url_to_fs(path, **storage_options)
            if storage_options and not is_remote(fs):
                name = next(iter(storage_options))
                raise unknown_argument(type(self).__name__, name, ["cache_dir"])
            is_pattern = any(mark in pattern for mark in "*?[")
            glob = functools.partial(fs.glob, pattern)
            names = sorted(_retried(glob)) if is_pattern else [pattern]
            if not names:
                raise FileNotFoundError(f"No file matches {path!r}.")
            for name in names:
                self.paths.append(fs.unstrip_protocol(name) if is_remote(fs) else name)
                self._stamps.append(_retried(functools.partial(_stamp, fs, name)))
        self._storage_options = storage_options
        self.kept_rows = 0
        """Number of decoded records to keep in memory."""
        self.in_order = False
        """Whether records that are decoded together are read in order."""
        self.close()
        self._indexes = [self._load_index(number) for number in range(len(self.paths))]
        counts = [self._count(index) for index in self._indexes]
        self._ends = np.cumsum(counts, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __repr__(self) -> str:
        return f"{len(self.paths)} files with {len(self)} records"

    def __getstate__(self) -> dict[str, Any]:
        transient = ("_files", "_pid", "_tables")
        return {key: value for key, value in vars(self).items() if key not in transient}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # fsspec cannot close a file when Python exits
            for file in self._files.values():
                file.close()

    def close(self) -> None:
        """Close the files. The next read opens them, and finds out whether they have changed."""
        self.__del__()
        # Forked processes share the positions of open files.
        self._pid = os.getpid()
        self._files: OrderedDict[int, Any] = OrderedDict()
        self._tables: OrderedDict[tuple[int, int], Any] = OrderedDict()

    def stamps(self) -> list[int]:
        """Return a number for each file that changes with its name, size, and version."""
        names = [os.path.basename(path) for path in self.paths]
        pairs = zip(names, self._stamps, strict=True)
        return [zlib.crc32(f"{name} {stamp}".encode()) for name, stamp in pairs]

    def read(self, numbers: Sequence[int] | np.ndarray[Any, Any]) -> list[Any]:
        """Return the records with these numbers. A `RecordError` replaces a broken one."""
        if self._pid != os.getpid():
            self.close()
        order = np.argsort(numbers, kind="stable")
        in_order = np.asarray(numbers, np.int64)[order]
        files = np.searchsorted(self._ends, in_order, side="right")
        results: list[Any] = [None] * len(order)
        for first, stop in runs(files, 0):
            file = int(files[first])
            start = self._ends[file - 1] if file else 0
            if "://" not in self.paths[file]:  # remote files are checked when they are opened
                self._check_stamp(file, _stamp(None, self.paths[file]))
            records = self._read(file, in_order[first:stop] - start)
            for place, record in zip(order[first:stop].tolist(), records, strict=True):
                results[place] = record
        return results

    # ---- formats

    @abstractmethod
    def _build_index(self, number: int) -> np.ndarray[Any, Any]: ...

    @abstractmethod
    def _count(self, index: Any) -> int: ...

    @abstractmethod
    def _read(self, file: int, numbers: np.ndarray[Any, Any]) -> list[Any]:
        """Return records of one file. The numbers are sorted."""

    # ---- files

    def _load_index(self, number: int) -> Any:
        path = self._cached(number, f"{type(self).__name__}.npy")
        if not path.exists():
            index = self._build_index(number)
            with replacing(path) as target:
                np.save(target, index)
        return np.load(path, mmap_mode="r") if path.stat().st_size > 2**16 else np.load(path)

    def _cached(self, number: int, kind: str) -> Path:
        self._cache.mkdir(parents=True, exist_ok=True)
        key = hashlib.sha256(f"{self.paths[number]} {self._stamps[number]}".encode()).hexdigest()
        return self._cache / f"{key[:24]}.{kind}"

    def _check_stamp(self, number: int, stamp: str) -> None:
        if stamp != self._stamps[number]:
            raise RuntimeError(
                f"{self.paths[number]} changed while it was read. Its size and version are "
                f"{stamp}, and were {self._stamps[number]}. Start again with the new file."
            )

    def _open(self, number: int) -> Any:
        """Open the uncompressed content of a file."""
        path = self.paths[number]
        fs, name = url_to_fs(path, **self._storage_options)
        self._check_stamp(number, _stamp(fs, name))
        compression = _compression(path)
        if compression is not None:
            target = self._cached(number, "raw")
            if not target.exists():
                options = {"compression": compression, **self._storage_options}
                with fsspec.open(path, **options) as source, replacing(target) as file:
                    shutil.copyfileobj(source, file, 2**20)
            return open(target, "rb")
        if not is_remote(fs):
            return open(name, "rb")
        options = {"cache_type": "background", "block_size": _BLOCK_BYTES}
        return fs.open(name, "rb", cache_options={"maxblocks": _NUM_BLOCKS}, **options)

    def _file(self, number: int) -> Any:
        """Return an open file, which stays open for the next call."""
        if number not in self._files:
            self._files[number] = self._open(number)
            if len(self._files) > _NUM_OPEN:
                self._files.popitem(last=False)[1].close()
        self._files.move_to_end(number)
        return self._files[number]

    def _with_file(self, number: int, read: Callable[[Any], T]) -> T:
        """Call `read` with an open file. Open it again after an error.

        Name the file in errors about its content.
        """

        def attempt() -> T:
            try:
                return read(self._file(number))
            except Exception:
                if number in self._files:
                    self._files.pop(number).close()
                raise

        try:
            return _retried(attempt)
        except Exception as error:
            # pyarrow and bz2 raise an OSError without a number for wrong content.
            is_bare = type(error) is OSError and error.errno is None
            if isinstance(error, RecordError) or not (is_bare or isinstance(error, _BAD_CONTENT)):
                raise
            raise RecordError(f"{self.paths[number]}: {error}") from error

    def _read_at(self, number: int, start: int, size: int) -> bytes:
        def read(file: Any) -> bytes:
            file.seek(start)
            data: bytes = file.read(size)
            return data

        return self._with_file(number, read)


class _Spans(Records):
    """Records that are consecutive bytes. The index has the start of each, and the end."""

    def _count(self, index: Any) -> int:
        return len(index) - 1

    def _read(self, file: int, numbers: np.ndarray[Any, Any]) -> list[Any]:
        index, records = self._indexes[file], []
        for run, end in runs(numbers, 1):
            first, stop = int(numbers[run]), int(numbers[end - 1]) + 1
            starts = index[first : stop + 1].tolist()
            data = self._read_at(file, starts[0], starts[-1] - starts[0])
            if len(data) < starts[-1] - starts[0]:
                raise RuntimeError(f"{self.paths[file]} has become shorter. Start again with it.")
            for number, (low, high) in enumerate(itertools.pairwise(starts), start=first):
                try:
                    records.append(self._decode(data[low - starts[0] : high - starts[0]]))
                except Exception as error:
                    place = f"{self.paths[file]}, {self.unit} {number + 1}"
                    records.append(RecordError(f"{place}: {error}"))
        return records

    @abstractmethod
    def _decode(self, data: bytes) -> Any: ...


class text(_Spans):  # noqa: N801  users call the formats like functions
    """The lines of text files, without line ends.

    `Records` describes the arguments.
    """

    unit = "line"
    keeps_blank = True

    def _build_index(self, number: int) -> np.ndarray[Any, Any]:
        starts, offset, rest = [], 0, b""
        while data := self._read_at(number, offset + len(rest), _BLOCK_BYTES):
            data = rest + data
            size = data.rfind(b"\n") + 1
            starts.append(self._starts(data[:size]) + offset)
            offset, rest = offset + size, data[size:]
        if rest:
            starts.append(self._starts(rest + b"\n") + offset)
        return np.concatenate([*starts, np.array([offset + len(rest)])])

    def _starts(self, lines: bytes) -> np.ndarray[Any, Any]:
        values = np.frombuffer(lines, np.uint8)
        ends = np.flatnonzero(values == ord("\n")) + 1
        starts = np.concatenate([ends[:1] * 0, ends[:-1]])
        if self.keeps_blank:
            return starts
        maybe = np.flatnonzero(values[starts] <= ord(" ")).tolist()
        return np.delete(starts, [n for n in maybe if not lines[starts[n] : ends[n]].strip()])

    def _decode(self, data: bytes) -> Any:
        return data.decode().rstrip("\r\n")


class jsonl(text):  # noqa: N801
    """The values of JSON lines. Blank lines do not count.

    `Records` describes the arguments.
    """

    unit = "non-blank line"
    keeps_blank = False

    def _decode(self, data: bytes) -> Any:
        return json.loads(data)


class tar(_Spans):  # noqa: N801
    """The samples of tar archives: dicts of the content of consecutive files with the same stem.

    ``"__key__"`` is the path up to the first dot of the file name, and the other keys are the rest
    of the names, as in WebDataset. `Records` describes the arguments.
    """

    unit = "sample"

    def _build_index(self, number: int) -> np.ndarray[Any, Any]:
        return self._with_file(number, self._index_of)

    def _index_of(self, file: Any) -> np.ndarray[Any, Any]:
        starts, key, end = [], None, 0
        file.seek(0)
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                end = member.offset_data + -(-member.size // 512) * 512
                if not member.isfile():
                    continue
                stem = _stem(member.name)[0]
                if stem != key:
                    starts.append(member.offset)
                    key = stem
                vars(archive)["members"] = []  # would grow with the file
        return np.array([*starts, end], np.int64)

    def _decode(self, data: bytes) -> Any:
        sample: dict[str, Any] = {}
        for path, content in _members(data):
            sample["__key__"], name = _stem(path)
            sample[name] = content
        return sample


def _members(data: bytes) -> list[tuple[str, bytes]]:
    """Return the names and contents of the files in a part of a tar archive."""
    members, start = [], 0
    while start < len(data):
        header = data[start : start + 512]
        # tarfile takes longer than decoding a small image. It reads all other kinds of members.
        if header[156] not in b"0\0" or header[124] & 128:
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
                files = [member for member in archive if member.isfile()]
                opened: list[Any] = [archive.extractfile(member) for member in files]
                pairs = zip(files, opened, strict=True)
                return [(member.name, file.read()) for member, file in pairs]
        name, prefix = (header[a:b].partition(b"\0")[0] for a, b in ((0, 100), (345, 500)))
        if prefix and header.startswith(b"ustar\0", 257):
            name = prefix + b"/" + name
        size = int(header[124:136].strip(b" \0") or b"0", 8)
        members.append((name.decode(), data[start + 512 : start + 512 + size]))
        start += 512 + -(-size // 512) * 512
    return members


def is_remote(fs: Any) -> bool:
    return "file" not in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,))


def _compression(path: str) -> str | None:
    """Return the fsspec name of the compression of a file."""
    if path.endswith(".tgz"):
        return "gzip"
    name: str | None = infer_compression(path)
    for ending, package in ((".zst", "zstandard"), (".lz4", "lz4")):
        if name is None and path.endswith(ending):
            raise ValueError(f"to read {ending} files, install {package}")
    return name


def _stamp(fs: Any, path: str) -> str:
    """Return the size and the ETag or modification time of a file."""
    if fs is None or not is_remote(fs):
        status = os.stat(path)
        return f"{status.st_size} {status.st_mtime}"
    info = fs.info(path)
    names = ("ETag", "etag", "mtime", "LastModified", "Last-Modified", "created")
    version = next((info[name] for name in names if info.get(name) is not None), "")
    return f"{info['size']} {version}"


def _retried(function: Callable[[], T]) -> T:
    """Call a function again after errors of the network, which can have any class."""
    for attempt in range(1, _NUM_TRIES):
        try:
            return function()
        except _PERMANENT:
            raise
        except Exception:
            time.sleep(0.1 * 4**attempt)
    return function()


def runs(values: np.ndarray[Any, Any], step: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the parts in which each value is `step` more than the one before."""
    bounds = (values[1:] - values[:-1] != step).nonzero()[0] + 1
    return itertools.pairwise(sorted({0, *bounds.tolist(), len(values)}))


def _stem(name: str) -> tuple[str, str]:
    folder, base = os.path.split(name)
    stem, _, rest = base.partition(".")
    return os.path.join(folder, stem), rest
