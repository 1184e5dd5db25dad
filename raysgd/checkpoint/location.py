"""Where files lie: at a path, or behind a URL of a file system that fsspec knows."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from raysgd._internal.files import replacing, sync_folder, temporary_name
from raysgd._internal.paths import checked_path, shown_url, without_secrets
from raysgd.errors import CheckpointError

__all__ = ["Location", "UnreachableError", "first_line", "locate"]

_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci"}
"""File systems in which a file appears when its upload ends, and renaming is a second upload."""


class UnreachableError(CheckpointError):
    """A place could not be read: no permission, or no answer.

    The checkpoint itself may be intact.
    """


class Location:
    """A file or a folder, by its path or URL. It need not exist.

    All methods raise CheckpointError. The file system decides how long it waits for a server.

    Attributes:
        name: the absolute path, or the URL.
        shown: its name in messages, without passwords and signatures.
        is_local: whether it is a path.
    """

    def __init__(self, text: str) -> None:
        scheme, separator, rest = text.partition("://")
        self.is_local = not separator or scheme in ("file", "local")
        if self.is_local:
            try:
                path = checked_path("path", rest if separator else text).absolute()
            except ValueError as error:
                raise CheckpointError(str(error)) from error
            self.name = self.shown = str(path)
        else:
            self.name, self.shown = text, shown_url(text)
            self._check_protocols()

    def _check_protocols(self) -> None:
        from fsspec import get_filesystem_class

        for protocol in (part.partition("://")[0] for part in self.name.split("::")):
            try:
                get_filesystem_class(protocol)
            except ImportError as error:  # names the package to install
                raise CheckpointError(f"Cannot open {self.shown}: {error}") from error
            except ValueError as error:
                # a password with :: in it looks like a chain of URLs
                named = f"{protocol}://" if protocol in self.shown else "it"
                raise CheckpointError(
                    f"Cannot open {self.shown}: nothing opens {named}. Known are file://, "
                    "memory://, and with the package in brackets installed, s3:// (s3fs), "
                    "gs:// (gcsfs), az:// (adlfs), hdfs:// (pyarrow), sftp:// (paramiko), "
                    "https:// (aiohttp) and others, which fsspec lists."
                ) from self._cause(error)

    def child(self, name: str) -> Location:
        """Return a file in this folder."""
        return Location(f"{self.name.rstrip('/')}/{name}")

    def check_writable(self) -> str:
        """Return the name of the file that a write replaces. Only a write checks a URL."""
        return str(_target_of(self.name)) if self.is_local else self.name

    def write(self, fill: Callable[[IO[bytes]], None]) -> str:
        """Write a file, whole or not at all, and return its name.

        A URL is uploaded from the local disk. If a path is a link, the target is replaced.

        Args:
            fill: takes a file that is open for reading and writing.
        """
        shown = self.check_writable() if self.is_local else self.shown
        try:
            if self.is_local:
                with replacing(Path(shown)) as file:
                    fill(file)
                return shown
            with _scratch_file() as local:
                with local.open("xb+") as file:
                    fill(file)
                with self._file_system("save to") as (fs, path):
                    _upload(str(local), fs, path)
            return self.name
        except UnreachableError:
            raise
        except Exception as error:
            folder, cause = os.path.dirname(shown), _system_error(error)
            is_gone = self.is_local and not os.path.isdir(folder)
            gone = f"the folder {folder} was removed: " if is_gone else ""
            raise CheckpointError(f"Cannot save to {shown}: {gone}{cause}") from cause

    @contextlib.contextmanager
    def open(self, whole: bool = True) -> Iterator[IO[bytes]]:
        """Open the file for reading. With `whole` it is fetched to the local disk first."""
        with contextlib.ExitStack() as stack:
            with self._file_system("load") as (fs, path):
                if not self.is_local and not whole:
                    with fs.open(path, "rb") as file:
                        yield file
                    return
                local = Path(path)
                if not self.is_local:
                    local = stack.enter_context(_scratch_file())
                    fs.get_file(path, str(local))
                if not local.is_file():
                    is_folder = local.is_dir() or not self.is_local
                    problem = "it is a folder" if is_folder else "there is no such file"
                    raise CheckpointError(f"Cannot load {self.shown}: {problem}.")
                file = stack.enter_context(local.open("rb"))
            yield file

    def remove(self) -> None:
        """Remove the file, if it is there."""
        with self._file_system("remove") as (fs, path), contextlib.suppress(FileNotFoundError):
            fs.rm_file(path)

    def make_folder(self) -> None:
        """Make this folder, except in an object store: that would make a bucket."""
        with self._file_system("make the folder") as (fs, path):
            if not _is_object_store(fs):
                fs.makedirs(path, exist_ok=True)
            if self.is_local:
                sync_folder(Path(path).parent)

    def file_names(self) -> list[str]:
        """Return the names of the files in this folder; none if there is no such folder."""
        with self._file_system("list") as (fs, path):
            fs.invalidate_cache()  # another process may have written since
            with contextlib.suppress(FileNotFoundError):
                infos = fs.ls(path, detail=True)
                files = (info["name"] for info in infos if info["type"] != "directory")
                return [name.rstrip("/").rsplit("/", 1)[-1] for name in files]
            return []

    @contextlib.contextmanager
    def _file_system(self, verb: str) -> Iterator[tuple[Any, str]]:
        """Yield the file system and the path in it, and replace its errors by ours."""
        from fsspec import filesystem
        from fsspec.core import url_to_fs

        try:
            # a path may have the :: of a chain of URLs in it
            yield (filesystem("file"), self.name) if self.is_local else url_to_fs(self.name)
        except CheckpointError:
            raise
        except Exception as error:
            if isinstance(error, FileNotFoundError) and verb == "load":
                raise CheckpointError(
                    f"Cannot load {self.shown}: there is no such file."
                ) from self._cause(error)
            text = without_secrets(first_line(error).replace(self.name, self.shown))
            if self.is_local and not isinstance(error, PermissionError):
                raise CheckpointError(f"Cannot {verb} {self.shown}: {text}") from error
            raise UnreachableError(f"Cannot {verb} {self.shown}: {text}") from self._cause(error)

    def _cause(self, error: BaseException) -> BaseException | None:
        """Return an error as the cause of ours, unless its text may show a secret."""
        return error if self.shown == self.name else None


def locate(path: str | os.PathLike[str]) -> Location:
    """Return the place that a path or a URL names.

    Raises:
        TypeError: if it is neither.
        CheckpointError: if it is a URL that no installed package can open.
    """
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"A path must be a text, but it is {path!r}.")
    return Location(text)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if it has no text."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _system_error(error: BaseException) -> BaseException:
    """Return the error of the system that led to `error`, or `error`.

    The writer of torch fails once more when it is closed, and raises that second error.
    """
    first: BaseException | None = error
    while first is not None and not isinstance(first, OSError):
        first = first.__context__
    return error if first is None else first


def _target_of(name: str) -> Path:
    """Return the file that a write to a path replaces."""
    try:
        target = Path(name).resolve()
        folder = target.parent
        if target.is_dir():
            problem = "it is a folder; give the name of a file in it"
        elif target.exists() and not target.is_file():
            problem = "it is no regular file"
        elif not folder.is_dir():
            problem = f"the folder {folder} does not exist; create it first"
        elif not os.access(folder, os.W_OK | os.X_OK):
            problem = f"there is no permission to write into {folder}"
        else:
            return target
    except (OSError, RuntimeError, ValueError) as error:  # too long, a ring of links, a zero
        raise CheckpointError(f"Cannot save to {name}: {error}") from error
    raise CheckpointError(f"Cannot save to {target}: {problem}.")


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
        fs.invalidate_cache()  # it may still list the temporary file
        if fs.exists(temporary):  # WebHDFS refuses without an error
            raise OSError(
                "what was uploaded was not renamed to it. Some servers replace no file: "
                "save to another name, or remove the one that is there"
            )
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
