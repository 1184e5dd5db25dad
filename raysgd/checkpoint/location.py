"""Where a file lies: what the local disk and the file systems behind URLs have in common."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import IO, TypeVar

from raysgd.errors import CheckpointError

__all__ = ["Entry", "Location", "UnreachableError", "first_line", "locate", "system_error"]

T = TypeVar("T")


class UnreachableError(CheckpointError):
    """A place did not let itself be read: no permission, or no answer.

    It says nothing about the checkpoint, which may be in order.
    """


@dataclass(frozen=True)
class Entry:
    """A file in a folder."""

    name: str
    modified: float | None
    """In seconds since 1970; None if unknown."""


class Location(ABC):
    """A file or a folder, which need not be there. All methods raise CheckpointError.

    Attributes:
        name: the absolute path, or the URL.
        shown: how messages name it.
    """

    name: str
    shown: str

    @abstractmethod
    def check_writable(self) -> str:
        """Return the name of what would be written, if it can be, as far as that shows."""

    @abstractmethod
    def write(self, fill: Callable[[IO[bytes]], None]) -> str:
        """Write a file, whole or not at all, and return its name.

        Args:
            fill: is given a file that is open for reading and writing.
        """

    @abstractmethod
    def open(self) -> AbstractContextManager[IO[bytes]]:
        """Open all of the file for reading, on local disk."""

    @abstractmethod
    def inspect(self, read: Callable[[IO[bytes]], T]) -> T:
        """Return what `read` makes of the file, which is fetched only where it is read."""

    @abstractmethod
    def remove(self) -> None:
        """Remove the file, if it is there."""

    @abstractmethod
    def child(self, name: str) -> Location:
        """Return a file in this folder."""

    @abstractmethod
    def make_folder(self) -> None:
        """Make this folder, if it is not there."""

    @abstractmethod
    def entries(self) -> list[Entry]:
        """Return the files in this folder; none if there is no such folder."""


def locate(path: str | os.PathLike[str]) -> Location:
    """Return the place that a path or a URL names.

    Raises:
        CheckpointError: if it is a URL that nothing which is installed can open.
    """
    text = os.fspath(path)
    scheme, separator, rest = text.partition("://")
    if separator and scheme not in ("file", "local"):
        from raysgd.checkpoint.remote import RemoteFile

        return RemoteFile(text)
    from raysgd.checkpoint.local import LocalFile

    return LocalFile(rest if separator else text)


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
