"""Names for files that are being written, and which of them a dead writer left behind."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import uuid
from pathlib import Path

import psutil

__all__ = ["is_leftover", "temporary_name"]

_NAME = re.compile(r"\.saving-(?P<machine>[0-9a-f]{12})-(?P<pid>[0-9]+)-[0-9a-f]+")
_PREFIX = ".saving-"
_DAY_S = 86400.0
_CLOCKS_S = 10.0
"""How far the clock of a file system may be off from that of the processes."""


def temporary_name() -> str:
    """Return a new name for a file under way; it tells who writes it."""
    return f"{_PREFIX}{_machine()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def is_leftover(name: str, modified: float | None, now: float) -> bool:
    """Say whether a file in a folder is one that its writer did not live to rename.

    A writer on this machine is dead if no process has its number, or one that is younger than
    the file. Of writers elsewhere nothing can be known: theirs counts when it is a day old.

    Args:
        name: name of the file, without its folder.
        modified: when it was last written to, in seconds since 1970; None if unknown.
        now: the time, in the same way.
    """
    if not name.startswith(_PREFIX):
        return False
    match = _NAME.fullmatch(name)
    if match is None or match["machine"] != _machine():
        return modified is not None and now - modified > _DAY_S
    try:
        started = psutil.Process(int(match["pid"])).create_time()
    except (psutil.NoSuchProcess, OverflowError):
        return True
    except psutil.AccessDenied:
        return False
    return modified is not None and started > modified + _CLOCKS_S


@functools.cache
def _machine() -> str:
    """Return a name of what process numbers are valid in: one start of a machine or container."""
    known = [platform.node()]
    for path, read in (
        ("/proc/sys/kernel/random/boot_id", Path.read_text),
        ("/proc/self/ns/pid", os.readlink),
    ):
        try:
            known.append(read(Path(path)))
        except OSError:  # another system than Linux
            continue
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:12]
