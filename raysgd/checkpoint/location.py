"""Files at a path, or at a URL for fsspec."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from raysgd._internal.files import atomic_write, check_regular, sync_folder, temporary_name
from raysgd._internal.paths import as_path, redact_url, without_secrets
from raysgd.errors import CheckpointError

_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci"}
"""File systems that do not support renaming, and show a file when its upload is complete."""


class UnreachableError(CheckpointError):
    """raysgd could not read a location. The checkpoint itself may be intact."""


class Location:
    """The path or URL of a file or folder that may be missing. Methods raise CheckpointError.

    `path` is the absolute path or the URL. `label` is `path` without passwords and signatures.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        text = os.fspath(path) if isinstance(path, os.PathLike) else path
        if not isinstance(text, str):
            raise TypeError(f"{path!r}: must be a path or URL.")
        scheme, separator, rest = text.partition("://")
        self.is_local = not separator or scheme in ("file", "local")
        if self.is_local:
            try:
                local = as_path("path", rest if separator else text)
            except ValueError as error:
                raise CheckpointError(str(error)) from error
            self.path = self.label = str(local.absolute())
        else:
            self.path, self.label = text, redact_url(text)

    def child(self, name: str) -> Location:
        return Location(f"{self.path.rstrip('/')}/{name}")

    def write(self, fill: Callable[[IO[bytes]], Any], reraised: Sequence[Exception] = ()) -> str:
        """Write a file completely or not at all, and return its name.

        `fill` gets a file that is open for reading and writing. A URL is uploaded from a temporary
        file. If a path is a link, its target is replaced. Errors that `fill` adds to `reraised`
        are raised as they are.
        """
        try:
            if self.is_local:
                target = Path(self.path).resolve()
                with atomic_write(target) as file:
                    fill(file)
                return str(target)
            with _scratch_file() as local:
                with local.open("xb+") as file:
                    fill(file)
                with self._file_system("save to") as (fs, path):
                    _upload(str(local), fs, path)
            return self.path
        except Exception as error:
            if isinstance(error, CheckpointError) or error in reraised:
                raise
            cause: Any = error
            # Closing the writer of `torch.save` raises another error after a failed write.
            while cause and not isinstance(cause, OSError):
                cause = cause.__context__
            reason = (cause and cause.strerror) or cause or error
            raise CheckpointError(f"Cannot save to {self.label}: {reason}") from error

    @contextlib.contextmanager
    def open(self, downloads: bool = True) -> Iterator[IO[bytes]]:
        """Open the file for reading. Download it first, unless not `downloads`."""
        with self._file_system("load") as (fs, path), contextlib.ExitStack() as stack:
            if self.is_local:
                check_regular(Path(path))
            if downloads and not self.is_local:
                local = stack.enter_context(_scratch_file())
                fs.get_file(path, str(local))
                yield stack.enter_context(local.open("rb"))
            else:
                yield stack.enter_context(fs.open(path, "rb"))

    def remove(self) -> None:
        with self._file_system("remove") as (fs, path), contextlib.suppress(FileNotFoundError):
            fs.rm_file(path)

    def make_folder(self) -> None:
        """Create this folder, except in an object store, where it could be a bucket.

        A local folder must be writable.
        """
        with self._file_system("make the folder") as (fs, path):
            if not _is_object_store(fs):
                fs.makedirs(path, exist_ok=True)
            if self.is_local:
                sync_folder(Path(path).parent)
                if not os.access(path, os.W_OK):
                    raise PermissionError("Permission denied")

    def file_names(self) -> list[str]:
        """Return the names of the files in this folder; none if it does not exist."""
        with self._file_system("list") as (fs, path):
            fs.invalidate_cache()  # another process may have written the file since
            try:
                infos = fs.ls(path, detail=True)
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error.__cause__):  # no save would succeed
                    raise
                return []
            files = (info["name"] for info in infos if info["type"] != "directory")
            return [name.rstrip("/").rsplit("/", 1)[-1] for name in files]

    @contextlib.contextmanager
    def _file_system(self, verb: str) -> Iterator[tuple[Any, str]]:
        """Yield the file system and the path in it. Convert its errors to CheckpointError."""
        from fsspec import filesystem
        from fsspec.core import url_to_fs

        try:
            # Do not use url_to_fs for local paths, because it would split a path at "::".
            yield (filesystem("file"), self.path) if self.is_local else url_to_fs(self.path)
        except CheckpointError:
            raise
        except Exception as error:
            if isinstance(error, FileNotFoundError) and verb == "load":
                raise CheckpointError(f"Cannot load {self.label}: there is no such file.") from None
            text = without_secrets(first_line(error).replace(self.path, self.label))
            may_be_intact = not self.is_local or isinstance(error, PermissionError)
            kind = UnreachableError if may_be_intact else CheckpointError
            # The text of a remote error may contain a secret.
            cause = error if self.is_local else None
            raise kind(f"Cannot {verb} {self.label}: {text}") from cause


def first_line(error: BaseException) -> str:
    """Return the first line of an error, or its type if it has no text."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _upload(local: str, fs: Any, path: str) -> None:
    if _is_object_store(fs):
        fs.put_file(local, path)
        return
    if fs.isdir(path):
        raise IsADirectoryError("it is a folder; give the name of a file in it")
    temporary = f"{fs._parent(path)}/{temporary_name(path.rsplit('/', 1)[-1])}"
    try:
        fs.put_file(local, temporary)
        fs.mv(temporary, path)
    except BaseException:
        with contextlib.suppress(Exception):
            fs.rm_file(temporary)
        raise


def _is_object_store(fs: Any) -> bool:
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    return not _OBJECT_STORES.isdisjoint(protocols)


@contextlib.contextmanager
def _scratch_file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="raysgd-") as folder:
        yield Path(folder, "state")
