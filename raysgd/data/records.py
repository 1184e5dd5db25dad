"""Numbered records of files, whatever their format.

An index of each file is built once and kept in a cache folder, so that any record can be read
without the records before it. Compressed files are decompressed once into that folder.
"""

import contextlib
import errno
import hashlib
import io
import itertools
import os
import re
import tarfile
import time
import zlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import numpy as np
from fsspec.core import url_to_fs

from raysgd._internal.arguments import unknown_argument
from raysgd._internal.files import atomic_write, lock_of_node
from raysgd._internal.paths import as_path, without_secrets
from raysgd.data.compression import decompressor_of

T = TypeVar("T")

BLOCK_BYTES = 4 * 2**20
_NUM_BLOCKS = 32  # of a remote file in memory
_NUM_TRIES = 4
_MAX_OPEN = 16
_BAD_CONTENT = EOFError, ValueError, tarfile.TarError
_PERMANENT = (
    *(FileNotFoundError, PermissionError, IsADirectoryError, ImportError, RuntimeError, TypeError),
    *_BAD_CONTENT,
)
_FINAL_STATUS = {*range(400, 500)} - {408, 425, 429}
_CACHE_ERRNOS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM),
    *(errno.ENOTDIR, errno.EEXIST),
}
"""Errors of a folder that is full, read-only, or of another user."""
_WEB = "http://", "https://"
_COPY_TIME = 10**9  # modification time of decompressed copies, until they change


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
        IsADirectoryError: If one of `paths` is a local folder.
        RecordError: If a file is damaged, or is not of the format.
        TypeError: If local files get `storage_options`.
        ValueError: If two different `paths` match the same file.
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
        is_one = isinstance(paths, bytes | Mapping) or not isinstance(paths, Iterable)
        path_list = [paths] if is_one or isinstance(paths, str | os.PathLike) else list(paths)
        if not path_list:
            raise FileNotFoundError(f"{type(self).__name__}({paths!r}): needs at least one path.")
        own = os.environ.get("XDG_CACHE_HOME", "")
        cache = cache_dir or Path(own if os.path.isabs(own) else "~/.cache", "raysgd")
        self._cache = as_path("cache_dir", cache)
        self.paths: list[str] = []
        self._stamps: list[str] = []
        self._versions: dict[int, str] = {}
        """Versions of the files, on this host."""
        found: dict[str, str] = {}  # the path or pattern of each file
        for given in path_list:
            if not isinstance(given, str | os.PathLike) or not (path := os.fspath(given)):
                raise TypeError(
                    f"{type(self).__name__}({paths!r}): must be a path or a URL, or a list of them."
                )
            fs, pattern = url_to_fs(path, **storage_options)
            if storage_options and not is_remote(fs):
                name = next(iter(storage_options))
                raise unknown_argument(type(self).__name__, name, ["cache_dir"])
            if not (names := _find_files(fs, pattern)):
                raise FileNotFoundError(f"No file matches {path!r}.")
            for name in names:
                if (other := found.setdefault(name, path)) != path:  # equal paths are meant
                    raise ValueError(
                        f"{type(self).__name__}({paths!r}): {other!r} and {path!r} both match "
                        f"{without_secrets(name)}, which would be read twice. Use patterns without "
                        "common files, or repeat a path to read its files more than once."
                    )
                if os.path.isdir(name) and not is_remote(fs):
                    raise IsADirectoryError(
                        f"{type(self).__name__}({path!r}): {name} is a folder. Pass its files, or "
                        "a pattern such as 'folder/*.txt'."
                    )
                stamp, version = _retry(_stamp, fs, name)
                self._versions[len(self.paths)] = version
                self.paths.append(fs.unstrip_protocol(name) if is_remote(fs) else name)
                self._stamps.append(stamp)
        self._storage_options = storage_options
        self.kept_rows = 0
        """Number of decoded records to keep in memory."""
        self.in_order = True
        """Whether records that are decoded together are read in order."""
        self._reset_files()
        self._indexes = [self._load_index(file) for file in range(len(self.paths))]
        counts = [self._num_records(index) for index in self._indexes]
        self._offsets = np.cumsum([0, *counts], dtype=np.int64)  # of files, and the end

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def __repr__(self) -> str:
        return f"{len(self.paths)} files with {len(self)} records"

    def __getstate__(self) -> dict[str, Any]:
        transient = ("_files", "_pid", "_tables")
        kept = {key: value for key, value in vars(self).items() if key not in transient}
        return {**kept, "_versions": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset_files()

    def _reset_files(self) -> None:
        # Forked processes share the positions of open files.
        self._pid = os.getpid()
        self._files: OrderedDict[int, Any] = OrderedDict()
        self._tables: OrderedDict[tuple[int, int], Any] = OrderedDict()

    def close(self) -> None:
        """Close the files. The next read opens them, and finds out whether they have changed."""
        with contextlib.suppress(Exception):  # fsspec cannot close a file when Python exits
            for file in self._files.values():
                file.close()
        self._reset_files()

    __del__ = close

    def stamps(self) -> list[int]:
        """Return a number for each file that changes with its name, size, and version."""
        names = [os.path.basename(_without_query(path)) for path in self.paths]
        pairs = zip(names, self._stamps, strict=True)
        return [zlib.crc32(f"{name} {stamp}".encode()) for name, stamp in pairs]

    def read(self, numbers: Sequence[int] | np.ndarray[Any, Any]) -> list[Any]:
        """Return the records with these numbers. A `RecordError` replaces a broken one."""
        if self._pid != os.getpid():
            self.close()
        order = np.argsort(numbers, kind="stable")
        in_order = np.asarray(numbers, np.int64)[order]
        files = np.searchsorted(self._offsets, in_order, side="right") - 1
        results: list[Any] = [None] * len(order)
        for first, stop in consecutive_runs(files, 0):
            file = int(files[first])
            if "://" not in self.paths[file]:  # remote files are checked when they are opened
                self._check_unchanged(file, *_stamp(None, self.paths[file]))
            records = self._read(file, in_order[first:stop] - self._offsets[file])
            for index, record in zip(order[first:stop].tolist(), records, strict=True):
                results[index] = record
        return results

    def locate(self, number: int) -> list[Any]:
        """Return the label of a record's file, and its number in the file, from 0."""
        file = int(np.searchsorted(self._offsets, number, side="right")) - 1
        return [self.label(file), int(number - self._offsets[file])]

    def label(self, file: int) -> str:
        """Return the path or URL of a file without passwords and signatures."""
        return without_secrets(self.paths[file])

    # ---- formats

    @abstractmethod
    def _build_index(self, file: int) -> np.ndarray[Any, Any]: ...

    @abstractmethod
    def _num_records(self, index: Any) -> int: ...

    @abstractmethod
    def _read(self, file: int, numbers: np.ndarray[Any, Any]) -> list[Any]:
        """Return records of one file. The numbers are sorted."""

    # ---- files

    def _load_index(self, file: int) -> Any:
        path = self._cache_path(file, f"{type(self).__name__}.npy")
        with contextlib.suppress(Exception):  # it is missing or damaged
            index = np.load(path, mmap_mode="r" if path.stat().st_size > 2**16 else None)
            if index.dtype == np.int64 and index.ndim == 1 and len(index):
                return index
        index = np.asarray(self._build_index(file), np.int64)
        with self._naming_cache(file), atomic_write(path) as target:
            np.save(content := io.BytesIO(), index)
            target.write(content.getbuffer())  # np.save hides why it cannot write
        return index

    def _cache_path(self, file: int, kind: str) -> Path:
        path, stamp, version = self.paths[file], self._stamps[file], self._versions[file]
        if not version and not stamp.endswith(" "):  # the server knows the version of the file
            path = _without_query(path)
        key = hashlib.sha256(f"{path} {stamp}{version}".encode()).hexdigest()
        return self._cache / f"{key[:24]}.{kind}"

    @contextlib.contextmanager
    def _naming_cache(self, file: int) -> Iterator[None]:
        """Name the file and `cache_dir` in errors of the cache."""
        try:
            self._cache.mkdir(parents=True, exist_ok=True)
            yield
        except OSError as error:
            if error.errno not in _CACHE_ERRNOS:
                raise
            raise RuntimeError(
                f"{self.label(file)}: raysgd cannot use its cache, {self._cache}: {error}. Pass "
                "cache_dir=... with a folder that you can write to, and that has enough space."
            ) from error

    def _check_unchanged(self, file: int, stamp: str, version: str) -> None:
        same, before = stamp == self._stamps[file], self._versions.setdefault(file, version)
        if same and before != version:  # or a new mode or link
            self._versions[file] = version
            same = np.array_equal(self._indexes[file], self._load_index(file))
        if not same:
            raise RuntimeError(
                f"{self.label(file)} changed while it was read. Its size and version are "
                f"{stamp}{version}, and were {self._stamps[file]}{before}. Start again with the "
                "new file."
            )

    def _open(self, file: int) -> Any:
        """Open the uncompressed content of a file."""
        path = self.paths[file]
        fs, name = url_to_fs(path, **self._storage_options)
        self._check_unchanged(file, *_stamp(fs, name))
        if (decompress := decompressor_of(_without_query(path))) is not None:
            target = self._cache_path(file, "raw")
            with self._naming_cache(file):
                if not _is_intact(target):
                    with lock_of_node(target.stem) as lock:
                        if not _is_intact(target):
                            self._decompress(file, decompress, target)
                        Path(lock.lock_file).unlink(missing_ok=True)
                return open(target, "rb")
        if not is_remote(fs):
            return open(name, "rb")
        options = {"cache_type": "background", "block_size": BLOCK_BYTES}
        return fs.open(name, "rb", cache_options={"maxblocks": _NUM_BLOCKS}, **options)

    def _decompress(
        self, file: int, decompress: Callable[[Any], Iterator[bytes]], target: Path
    ) -> None:
        path = self.paths[file]
        with fsspec.open(path, **self._storage_options) as source, atomic_write(target) as output:
            if "://" not in path:  # a user who cannot read the source cannot read the copy
                mode = os.stat(path).st_mode | 0o600
                os.fchmod(output.fileno(), os.fstat(output.fileno()).st_mode & mode & 0o777)
            output.writelines(decompress(source))
            output.flush()
            os.utime(output.fileno(), (time.time(), _COPY_TIME))

    def _with_file(self, file: int, read: Callable[[Any], T]) -> T:
        """Call `read` with an open file, which stays open. Open it again after an error.

        Name the file in errors about its content.
        """

        def attempt() -> T:
            if file not in self._files:
                self._files[file] = self._open(file)
                if len(self._files) > _MAX_OPEN:
                    self._files.popitem(last=False)[1].close()
            self._files.move_to_end(file)
            try:
                return read(self._files[file])
            except Exception:
                self._files.pop(file).close()
                raise

        try:
            return _retry(attempt)
        except Exception as error:
            # pyarrow and bz2 raise an OSError without a number for wrong content.
            is_bare = type(error) is OSError and error.errno is None
            if isinstance(error, RecordError) or not (is_bare or isinstance(error, _BAD_CONTENT)):
                raise
            raise RecordError(f"{self.label(file)}: {error}") from error

    def _read_at(self, file: int, start: int, size: int) -> bytes:
        def read(opened: Any) -> bytes:
            opened.seek(start)
            data: bytes = opened.read(size)
            total = getattr(opened, "size", None)  # of a remote file
            if isinstance(total, int) and len(data) < min(size, total - start):
                raise ConnectionError(f"{self.label(file)}: the answer has too few bytes")
            return data

        return self._with_file(file, read)


class ByteRecords(Records):
    """Records that are consecutive bytes. The index has the start of each, and the end."""

    def _num_records(self, index: Any) -> int:
        return len(index) - 1

    def _read(self, file: int, numbers: np.ndarray[Any, Any]) -> list[Any]:
        index, records = self._indexes[file], []
        for run, end in consecutive_runs(numbers, 1):
            first, stop = int(numbers[run]), int(numbers[end - 1]) + 1
            starts = index[first : stop + 1].tolist()
            data = self._read_at(file, starts[0], starts[-1] - starts[0])
            if len(data) < starts[-1] - starts[0]:
                raise RuntimeError(f"{self.label(file)} has become shorter. Start again with it.")
            for number, (low, high) in enumerate(itertools.pairwise(starts), start=first):
                try:
                    records.append(self._decode(data[low - starts[0] : high - starts[0]]))
                except Exception as error:
                    name = f"{self.label(file)}, {self.unit} {number + 1}"
                    records.append(RecordError(f"{name}: {error}"))
        return records

    @abstractmethod
    def _decode(self, data: bytes) -> Any: ...


def is_remote(fs: Any) -> bool:
    return "file" not in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,))


def _is_intact(copy: Path) -> bool:
    return copy.exists() and copy.stat().st_mtime == _COPY_TIME


def _without_query(path: str) -> str:
    """Return the URL of a file without the query, which may be a signature."""
    return re.split("[?#]", path)[0] if path.startswith(_WEB) else path


def _find_files(fs: Any, pattern: str) -> list[str]:
    """Return the files that match a pattern, unless hidden. A path that exists is no pattern."""
    marks = "[*[]" if pattern.startswith(_WEB) else "[*?[]"
    path = literal = _without_query(pattern)
    while re.search(marks, literal) and not _retry(fs.exists, literal):
        literal = literal.rpartition("/")[0]
    if literal == path:
        return [pattern]
    start = len(literal)
    pattern = re.sub(marks, r"[\g<0>]", literal) + pattern[start:]
    names = sorted(_retry(fs.glob, pattern))
    return [name for name in names if "/." not in name[start:] or "/." in path[start:]]


def _stamp(fs: Any, path: str) -> tuple[str, str]:
    """Return the size and the ETag or modification time of a file, and its version on this host.

    The version tells apart local files of the same size and date. For a URL, it is empty.
    """
    if fs is None or not is_remote(fs):
        status = os.stat(path)
        return f"{status.st_size} {status.st_mtime}", f" {status.st_ino} {status.st_ctime_ns}"
    info = fs.info(path)
    names = ("ETag", "etag", "mtime", "LastModified", "Last-Modified", "created")
    version = next((info[name] for name in names if info.get(name) is not None), "")
    return f"{info['size']} {version}", ""


def _retry(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function again after errors of the network, which can have any class."""
    for attempt in itertools.count(1):
        try:
            return function(*arguments)
        except Exception as error:
            # fsspec reports any failed request as a missing file.
            hidden = error.__cause__ if isinstance(error, FileNotFoundError) else None
            cause = hidden or error
            status = getattr(cause, "status", 0)
            is_final = isinstance(cause, _PERMANENT) or status in _FINAL_STATUS
            if attempt < _NUM_TRIES and not is_final:
                time.sleep(0.1 * 4**attempt)
            elif not hidden or status in (404, 410) or isinstance(cause, FileNotFoundError):
                raise
            else:
                raise ConnectionError(f"{error}: {cause!r}") from cause
    raise AssertionError


def consecutive_runs(values: np.ndarray[Any, Any], step: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the runs in which each value is `step` more than the one before."""
    bounds = (values[1:] - values[:-1] != step).nonzero()[0] + 1
    return itertools.pairwise(sorted({0, *bounds.tolist(), len(values)}))
