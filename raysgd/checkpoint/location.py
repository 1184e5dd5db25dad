"""Where files lie: on local disk, and whatever is mounted there, or behind a URL."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeAlias, TypeVar

from raysgd._internal.files import replacing, sync_folder
from raysgd._internal.paths import checked_path
from raysgd.errors import CheckpointError

if TYPE_CHECKING:
    from raysgd.checkpoint.remote import RemoteFile

__all__ = [
    "LocalFile",
    "Location",
    "UnreachableError",
    "first_line",
    "locate",
    "system_error",
]

T = TypeVar("T")
Location: TypeAlias = "LocalFile | RemoteFile"
"""A file or a folder, which need not be there. Both have the same methods."""


class UnreachableError(CheckpointError):
    """A place did not let itself be read: no permission, or no answer.

    It says nothing about the checkpoint, which may be in order.
    """


def locate(path: str | os.PathLike[str]) -> Location:
    """Return the place that a path or a URL names.

    Raises:
        TypeError: if it is neither.
        CheckpointError: if it is a URL that nothing which is installed can open.
    """
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"A path must be a text, but it is {path!r}.")
    scheme, separator, rest = text.partition("://")
    if separator and scheme not in ("file", "local"):
        from raysgd.checkpoint.remote import RemoteFile

        return RemoteFile(text)
    return LocalFile(rest if separator else text)


class LocalFile:
    """A path. A link stays one when it is written to, and its target is replaced.

    All methods raise CheckpointError.

    Attributes:
        name: the absolute path.
        shown: how messages name it.
    """

    def __init__(self, path: str) -> None:
        try:
            self._path = checked_path("path", path).absolute()
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        self.name = self.shown = str(self._path)

    def check_writable(self) -> str:
        """Return the name of what would be written, if it can be, as far as that shows."""
        return str(self._target())

    def write(self, fill: Callable[[IO[bytes]], None]) -> str:
        """Write a file, whole or not at all, and return its name.

        Args:
            fill: is given a file that is open for reading and writing.
        """
        target = self._target()
        try:
            with replacing(target) as file:
                fill(file)
        except Exception as error:
            gone = "" if target.parent.is_dir() else f"the folder {target.parent} was removed: "
            cause = system_error(error)
            raise CheckpointError(f"Cannot save to {target}: {gone}{cause}") from cause
        return str(target)

    def _target(self) -> Path:
        """Return the file that a write replaces: where the path is a link, what it points to."""
        try:
            target = self._path.resolve()
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
            raise CheckpointError(f"Cannot save to {self.shown}: {error}") from error
        raise CheckpointError(f"Cannot save to {target}: {problem}.")

    @contextlib.contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """Open all of the file for reading, on local disk."""
        try:
            if not self._path.is_file():
                problem = "it is a folder" if self._path.is_dir() else "there is no such file"
                raise CheckpointError(f"Cannot load {self.shown}: {problem}.")
            file = self._path.open("rb")
        except PermissionError as error:
            raise UnreachableError(f"Cannot load {self.shown}: {error}") from error
        except (OSError, ValueError) as error:
            raise CheckpointError(f"Cannot load {self.shown}: {error}") from error
        with file:
            yield file

    def inspect(self, read: Callable[[IO[bytes]], T]) -> T:
        """Return what `read` makes of the file, which is fetched only where it is read."""
        with self.open() as file:
            return read(file)

    def remove(self) -> None:
        """Remove the file, if it is there."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"Cannot remove {self.shown}: {error}") from error

    def child(self, name: str) -> LocalFile:
        """Return a file in this folder."""
        return LocalFile(str(self._path / name))

    def make_folder(self) -> None:
        """Make this folder and those above it, where they are not there."""
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            sync_folder(self._path.parent)
        except OSError as error:
            raise CheckpointError(f"Cannot make the folder {self.shown}: {error}") from error

    def file_names(self) -> list[str]:
        """Return the names of the files in this folder; none if there is no such folder."""
        try:
            with os.scandir(self._path) as entries:
                return [entry.name for entry in entries if entry.is_file()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UnreachableError(f"Cannot list {self.shown}: {error}") from error

    def folder_names(self) -> list[str]:
        """Return the names of the folders in this folder."""
        with contextlib.suppress(OSError), os.scandir(self._path) as entries:
            return [entry.name for entry in entries if entry.is_dir()]
        return []


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its type where it says nothing."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def system_error(error: BaseException) -> BaseException:
    """Return what the system said, where `error` came of it; else `error`.

    torch's writer fails once more as it is closed, and that is what it raises.
    """
    first: BaseException | None = error
    while first is not None and not isinstance(first, OSError):
        first = first.__context__
    return error if first is None else first
