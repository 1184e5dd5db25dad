"""Atomic replacement of files, files of JSON lines, and a lock of the node."""

import contextlib
import json
import logging
import os
import re
import stat
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from filelock import FileLock

from raysgd._internal.values import to_jsonable

logger = logging.getLogger(__name__)

TEMPORARY_NAME = re.compile(r"\.saving-[0-9a-f]{8}-(.+)")
"""Matches the name of an unfinished file. The group is its final name."""


def temporary_name(name: str) -> str:
    return f".saving-{uuid.uuid4().hex[:8]}-{name}"


@contextlib.contextmanager
def atomic_write(target: Path) -> Iterator[IO[bytes]]:
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


def complete_last_line(path: Path) -> None:
    """Create a file, or end its last line if a killed writer has left it incomplete."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def append_lines(path: Path, lines: Iterable[Mapping[str, Any]], keep_nan: bool = False) -> None:
    """Append JSON objects to a file, one per line."""
    complete_last_line(path)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(to_jsonable(line, keep_nan)) + "\n" for line in lines)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a file of JSON lines, without those whose writer was killed."""
    records = []
    lines = path.read_bytes().splitlines() if path.is_file() else ()
    for number, line in enumerate(filter(None, lines), start=1):
        try:
            records.append(json.loads(line))
        except ValueError:
            logger.warning("Skipped line %d of %s, which is incomplete.", number, path)
    return records


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
