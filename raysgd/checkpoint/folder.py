"""A state in a folder: a checkpoint, and beside it a file of the tensors that no process has whole.

The checkpoint is written last, and names the file of tensors with its hash: until then the folder
holds the state from before.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from raysgd._internal.files import TEMPORARY_NAME, sync_folder, temporary_name
from raysgd.checkpoint.location import LocalFile, Location
from raysgd.checkpoint.manifest import Manifest
from raysgd.errors import CheckpointError

__all__ = [
    "FILE",
    "STATE",
    "UnsharedFolderError",
    "checked_tensors",
    "hash_of",
    "new_tensors",
    "remove_folder",
    "remove_unfinished",
    "writable_folder",
    "write_folder",
]

STATE = "state.ckpt"
_TENSORS = re.compile(r"tensors-[0-9a-f]{8}")
FILE = "model-00001-of-00001.safetensors"
"""The name that torch gives a single file of tensors."""
_CHUNK = 1 << 20


class UnsharedFolderError(CheckpointError):
    """Workers are on hosts that have different folders of one name."""


def writable_folder(place: Location) -> Path:
    """Return a folder that workers write a state into together; it is made if it is not there.

    Raises:
        CheckpointError: if it is a URL, or no folder that can be written to.
    """
    if not isinstance(place, LocalFile):
        raise CheckpointError(
            f"Cannot save to {place.shown} with sharded=True: the workers write into a folder "
            "of a file system that all of them have mounted. Give its path."
        )
    if Path(place.name).is_file():
        raise CheckpointError(
            f"Cannot save to {place.shown} with sharded=True: it is a file, and must be a folder."
        )
    place.make_folder()
    return Path(place.name)


@contextlib.contextmanager
def new_tensors(folder: Path) -> Iterator[Path]:
    """Yield the name of a folder in another, for tensors; what is still there in the end goes."""
    tensors = folder / temporary_name("tensors")
    try:
        yield tensors
    finally:
        shutil.rmtree(tensors, ignore_errors=True)


def write_folder(state: Mapping[str, Any], folder: Path, manifest: Manifest) -> str:
    """Write a state to a folder, let go of the one before, and return the folder's path.

    Args:
        state: its ``tensors`` say in which folder of `new_tensors` they are, and their hash.
        folder: it may hold a state that was written to it before.
        manifest: what to say about the state.

    Raises:
        CheckpointError: if it cannot be written.
    """
    from raysgd.checkpoint.file import write_file  # which reads by this module

    written = Path(state["tensors"]["path"]).parent
    tensors = folder / f"tensors-{uuid.uuid4().hex[:8]}"
    try:
        written.rename(tensors)
        sync_folder(folder)
        told = {"file": f"{tensors.name}/{FILE}", "sha256": state["tensors"]["sha256"]}
        write_file({**state, "tensors": told}, folder / STATE, manifest)
    except BaseException as error:
        shutil.rmtree(tensors, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"Cannot save to {folder}: {error}") from error
        raise
    for each in folder.iterdir():
        if _TENSORS.fullmatch(each.name) and each != tensors:
            shutil.rmtree(each, ignore_errors=True)
    remove_unfinished(folder)
    return str(folder)


def remove_unfinished(folder: Path) -> None:
    """Remove what writers of tensors have left that were killed."""
    for each in folder.iterdir():
        found = TEMPORARY_NAME.fullmatch(each.name)
        if found and found[1] == "tensors":
            shutil.rmtree(each, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Remove a state: first what makes it one, so that a part of it is none.

    Raises:
        CheckpointError: if that cannot be removed.
    """
    LocalFile(str(folder / STATE)).remove()
    shutil.rmtree(folder, ignore_errors=True)


def hash_of(file: IO[bytes]) -> str:
    """Return the SHA-256 of what is left of a file."""
    found = hashlib.sha256()
    while part := file.read(_CHUNK):
        found.update(part)
    return found.hexdigest()


def checked_tensors(source: Location, told: Any) -> dict[str, str]:
    """Return where the tensors of a state are, once its file was seen to be as it was written.

    Args:
        source: the checkpoint.
        told: what it says of them.

    Raises:
        CheckpointError: if they are missing or damaged.
    """
    file, checksum = (told.get("file"), told.get("sha256")) if isinstance(told, dict) else (0, 0)
    folder, _, name = file.partition("/") if isinstance(file, str) else ("", "", "")
    if not isinstance(source, LocalFile) or not _TENSORS.fullmatch(folder) or name != FILE:
        raise CheckpointError(f"Cannot load {source.shown}: it names no file of its tensors.")
    path = Path(source.name).parent / folder / name
    try:
        with path.open("rb") as content:
            found = hash_of(content)
    except OSError as error:
        raise CheckpointError(f"Cannot load {source.shown}: its tensors: {error}") from error
    if found != checksum:
        raise CheckpointError(f"Cannot load {source.shown}: {path} is damaged.")
    return {"path": str(path)}
