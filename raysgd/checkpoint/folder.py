"""A state in a folder: a checkpoint, and beside it a file of the tensors that no process has whole.

The checkpoint is written last, and names the file of tensors with its hash: until then the folder
holds the state from before.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from raysgd.checkpoint.location import LocalFile, Location, locate
from raysgd.checkpoint.manifest import Manifest
from raysgd.errors import CheckpointError

__all__ = ["FILE", "STATE", "ShardedFolder", "checked_tensors", "hash_of"]

STATE = "state.ckpt"
_TENSORS = re.compile(r"tensors-[0-9a-f]{8}")
FILE = "model-00001-of-00001.safetensors"
"""The name that torch gives a single file of tensors."""
_CHUNK = 1 << 20


class ShardedFolder:
    """Where workers write a state together.

    Args:
        path: a folder; it is made if it is not there.

    Raises:
        CheckpointError: if it is a URL, or no folder that can be written to.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        place = locate(path)
        if not isinstance(place, LocalFile):
            raise CheckpointError(
                f"Cannot save to {place.shown} with sharded=True: the workers write into a folder "
                "of a file system that all of them have mounted. Give its path."
            )
        if Path(place.name).is_file():
            raise CheckpointError(
                f"Cannot save to {place.shown} with sharded=True: it is a file, and must be a "
                "folder."
            )
        place.make_folder()
        self.path = Path(place.name)

    def new_tensors(self) -> Path:
        """Return a folder that is not there, for the tensors of a state."""
        return self.path / f"tensors-{uuid.uuid4().hex[:8]}"

    def describe(self, state: dict[str, Any], tensors: Path, checksum: str) -> dict[str, Any]:
        """Return a state that says where its tensors are."""
        return {**state, "tensors": {"file": f"{tensors.name}/{FILE}", "sha256": checksum}}

    def write(self, state: Mapping[str, Any], manifest: Manifest, tensors: Path) -> str:
        """Write the checkpoint, let go of the one before, and return the folder's path."""
        from raysgd.checkpoint.file import write_file  # which reads by this module

        write_file(state, self.path / STATE, manifest)
        for each in self.path.iterdir():
            if _TENSORS.fullmatch(each.name) and each != tensors:
                shutil.rmtree(each, ignore_errors=True)
        return str(self.path)


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
