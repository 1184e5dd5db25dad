"""Atomic replacement of files, and a lock of the node."""

import contextlib
import os
import re
import stat
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from filelock import FileLock

TEMPORARY_NAME = re.compile(r"\.saving-[0-9a-f]{8}-(.+)")
"""Matches the name of an unfinished file. The group is its final name."""


def temporary_name(name: str) -> str:
    return f".saving-{uuid.uuid4().hex[:8]}-{name}"


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file in the same folder, with the mode of `target`.

    When the file is complete and on disk, it replaces `target`, unless this is not a regular file.
    """
    check_regular(target)
    temporary = target.with_name(temporary_name(target.name))
    try:
        with temporary.open("xb+") as file:
            with contextlib.suppress(FileNotFoundError):
                # Set the mode before the file has content that others must not read.
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


def check_regular(path: Path) -> None:
    """Raise OSError if a path exists, but leads to a folder, a device, or a pipe."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a regular file. Give the path of a file.")


def sync_folder(folder: Path) -> None:
    """Sync the folder to disk, so that a new name survives a power failure."""
    with contextlib.suppress(OSError):  # some file systems do not support it
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def lock_of_node(name: str = "data") -> contextlib.AbstractContextManager[Any]:
    """Return a lock that prevents workers of one node from downloading to the same files."""
    path = Path(tempfile.gettempdir()) / f"raysgd-{name}-{os.getuid()}.lock"
    try:
        path.open("a").close()
    except OSError as error:
        raise RuntimeError(
            f"Workers cannot lock their downloads: {error}. Delete the file, or set TMPDIR to a "
            "folder of yours."
        ) from error
    return FileLock(path)
