"""Files on local disk, and whatever is mounted there."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TypeVar

from raysgd.checkpoint.leftovers import temporary_name
from raysgd.checkpoint.location import Entry, Location, UnreachableError, system_error
from raysgd.errors import CheckpointError

__all__ = ["LocalFile"]

T = TypeVar("T")


class LocalFile(Location):
    """A path. A link stays one when it is written to, and its target is replaced."""

    def __init__(self, path: str) -> None:
        self._path = Path(path).expanduser().absolute()
        self.name = self.shown = str(self._path)

    def check_writable(self) -> str:
        """Check that the folder is there, and lets a file be written."""
        return str(self._target())

    def write(self, fill: Callable[[IO[bytes]], None]) -> str:
        """Write to a temporary name in the same folder, to the disk, and then rename."""
        target = self._target()
        temporary = target.with_name(temporary_name())
        try:
            try:
                with temporary.open("xb+") as file:
                    fill(file)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, target)
                _sync_folder(target.parent)
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
                raise
        # torch.save reports a full disk as RuntimeError, and what cannot be pickled as the others
        except (OSError, RuntimeError, pickle.PicklingError, AttributeError, TypeError) as error:
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
        """Open the file for reading."""
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
        """Return what `read` makes of the file."""
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
            _sync_folder(self._path.parent)
        except OSError as error:
            raise CheckpointError(f"Cannot make the folder {self.shown}: {error}") from error

    def entries(self) -> list[Entry]:
        """Return the files in this folder; none if there is no such folder."""
        found = []
        try:
            with os.scandir(self._path) as scan:
                for entry in scan:
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                        if entry.is_file():
                            found.append(Entry(entry.name, entry.stat().st_mtime))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UnreachableError(f"Cannot list {self.shown}: {error}") from error
        return found


def _sync_folder(folder: Path) -> None:
    """Write the folder's entries to disk, so that the new name survives a power failure."""
    with contextlib.suppress(OSError):  # some file systems cannot
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
