"""A state in a folder: a checkpoint, and a file of tensors that no process holds completely.

The checkpoint has the name and the hash of the tensor file. It is written last. Until then, the
folder holds the earlier state.
"""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from raysgd._internal.files import TEMPORARY_NAME, sync_folder, temporary_name
from raysgd.checkpoint.file import STATE, TENSORS_FILE, TENSORS_FOLDER, write_file
from raysgd.checkpoint.location import Location, locate
from raysgd.checkpoint.manifest import Manifest
from raysgd.errors import CheckpointError


class UnsharedFolderError(CheckpointError):
    """The hosts of the workers have separate folders with the same name."""


def writable_folder(place: Location) -> Path:
    """Create the folder that all workers write to."""
    if not place.is_local or Path(place.name).is_file():
        raise CheckpointError(
            f"Cannot save to {place.shown} with sharded=True: it must be a folder on a file system "
            "that all workers have mounted."
        )
    place.make_folder()
    return Path(place.name)


@contextlib.contextmanager
def new_tensors(folder: Path) -> Iterator[Path]:
    """Yield the name of a temporary folder for tensors. Remove the folder unless it was renamed."""
    tensors = folder / temporary_name("tensors")
    try:
        yield tensors
    finally:
        shutil.rmtree(tensors, ignore_errors=True)


def write_folder(state: Mapping[str, Any], folder: Path, manifest: Manifest) -> str:
    """Write a state to a folder, remove the earlier one, and return the folder's path.

    ``state["tensors"]`` has the hash of the tensor file, and its path in a folder of `new_tensors`.
    """
    tensors = folder / f"tensors-{uuid.uuid4().hex[:8]}"
    try:
        Path(state["tensors"]["path"]).parent.rename(tensors)
        sync_folder(folder)
        entry = {"file": f"{tensors.name}/{TENSORS_FILE}", "sha256": state["tensors"]["sha256"]}
        write_file({**state, "tensors": entry}, folder / STATE, manifest)
    except BaseException as error:
        shutil.rmtree(tensors, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"Cannot save to {folder}: {error}") from error
        raise
    for each in folder.iterdir():
        if TENSORS_FOLDER.fullmatch(each.name) and each != tensors:
            shutil.rmtree(each, ignore_errors=True)
    remove_unfinished(folder)
    return str(folder)


def remove_unfinished(folder: Path) -> None:
    """Remove temporary folders that killed writers left."""
    for each in folder.iterdir():
        match = TEMPORARY_NAME.fullmatch(each.name)
        if match and match[1] == "tensors":
            shutil.rmtree(each, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Remove a sharded state. Remove its checkpoint first, so that a partial state never loads."""
    locate(folder / STATE).remove()
    shutil.rmtree(folder, ignore_errors=True)
