"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

__all__ = ["TEMPORARY_NAME", "replacing", "sync_folder", "temporary_name"]

TEMPORARY_NAME = re.compile(r"\.saving-[0-9a-f]{8}-(.+)")
"""Of a file that is being written; in brackets the name that it gets when it is whole."""


def temporary_name(name: str) -> str:
    """Return a new name for a file that is to get `name` when it is whole."""
    return f".saving-{uuid.uuid4().hex[:8]}-{name}"


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of `target`, and its mode, when it is whole and on disk.

    Until then it has a temporary name in the same folder.
    """
    temporary = target.with_name(temporary_name(target.name))
    try:
        with temporary.open("xb+") as file:
            with contextlib.suppress(FileNotFoundError):
                # before anything is in it that others may not read
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        sync_folder(target.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Write the folder's entries to disk, so that a new name survives a power failure."""
    with contextlib.suppress(OSError):  # some file systems cannot
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
