"""One state in one file: written whole or not at all, and read without running code from it."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Mapping
from os.path import isfile, join
from typing import IO, Any

import numpy as np

from raysgd._internal.nested import map_leaves
from raysgd.checkpoint import arrays
from raysgd.checkpoint.checksum import add_checksums, checked_manifest
from raysgd.checkpoint.folder import STATE, checked_tensors
from raysgd.checkpoint.location import LocalFile, Location, locate
from raysgd.checkpoint.manifest import Manifest
from raysgd.errors import CheckpointError

__all__ = [
    "check_writable",
    "prepare_write",
    "read_checkpoint",
    "read_file",
    "read_manifest",
    "write_file",
]


def check_writable(path: str | os.PathLike[str]) -> str:
    """Return `path` as an absolute one, or the URL, if a file can be written there.

    Of a URL only that something can open it is known; no server is asked.

    Raises:
        CheckpointError: if its folder is missing or not writable, it is a folder itself, or it is
            a URL that nothing which is installed can open.
    """
    return locate(path).check_writable()


def write_file(
    state: Mapping[str, Any], path: str | os.PathLike[str], manifest: Manifest | None = None
) -> str:
    """Write a state to a path or a URL, replacing a file there.

    The state goes to a temporary name in the same folder, to the disk, and only then to its
    own name: whenever the process or the machine stops, `path` holds the old state or the new.
    ``torch.load`` opens the file, which also holds a manifest: see `read_manifest`.

    Args:
        state: what a trainer's ``state_dict`` returned.
        path: where to; a URL of any file system that fsspec knows.
        manifest: what to say about the state; its epoch, its step and its parts are filled in.

    Returns:
        The absolute path, or the URL.

    Raises:
        CheckpointError: if it cannot be written, or the user's part of it could not be loaded.
    """
    return prepare_write(state, path, manifest)()


def prepare_write(
    state: Mapping[str, Any], path: str | os.PathLike[str], manifest: Manifest | None = None
) -> Callable[[], str]:
    """Do all of `write_file` but the writing, and return a function that does that.

    Nobody may change what `state` holds until then.
    """
    target = locate(path)
    if "path" in (state.get("tensors") or ()):
        raise CheckpointError(
            f"Cannot save to {target.shown}: the tensors of this state are in "
            f"{state['tensors']['path']}. Load it with a trainer, and save that."
        )
    # numpy's numbers do not load without being allowed, and Python's do
    state = map_leaves(dict(state), lambda x: x.item() if isinstance(x, np.generic) else x)
    archive = arrays if _holds_arrays(state) else _tensors()
    for source in ("operator", "callbacks"):
        archive.check_loadable(source, state.get(source), target)
    manifest = dataclasses.replace(
        manifest or Manifest(),
        epoch=state.get("epoch", 0),
        global_step=state.get("global_step", 0),
    )

    def fill(file: IO[bytes]) -> None:
        archive.write(state, file)
        add_checksums(file, manifest)

    return functools.partial(target.write, fill)


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a state that `write_file`, or ``torch.save`` of an older library, wrote.

    Of a folder that workers wrote together it has all but large tensors: these are in the
    ``.safetensors`` file that ``state["tensors"]["path"]`` names. A trainer loads them from there.

    Raises:
        CheckpointError: if the file is missing, damaged, of a newer format, not a state, or holds
            objects that ``torch.load(weights_only=True)`` refuses.
    """
    return read_checkpoint(path)[0]


def read_manifest(path: str | os.PathLike[str]) -> Manifest | None:
    """Read what a file says about itself, without reading or checking its state.

    Returns:
        None for a file of an older library.

    Raises:
        CheckpointError: if the file is missing, of a newer format, or visibly damaged.
    """
    source = _file_at(path)
    return source.inspect(lambda file: checked_manifest(source, file, whole=False))


def read_checkpoint(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Manifest | None]:
    """Read a state as `read_file` does, together with its manifest."""
    source = _file_at(path)
    with source.open() as file:
        manifest = checked_manifest(source, file, whole=True)
        # through the file that was checked: another may have the name by now
        archive = arrays if arrays.wrote(file) else _tensors()
        file.seek(0)
        state = archive.read(source, file)
    missing = [
        key
        for key in ("models", "optimizers", "epoch")
        if not isinstance(state, dict) or key not in state
    ]
    if missing:
        raise CheckpointError(
            f"Cannot load {source.shown}: it is no state of a trainer, {', '.join(missing)} "
            "missing. Write one with trainer.save(path)."
        )
    if "tensors" in state:
        state["tensors"] = checked_tensors(source, state["tensors"])
    return state, manifest


def _file_at(path: str | os.PathLike[str]) -> Location:
    """Return the file that is read: of a folder of `ShardedFolder` the one in it."""
    source = locate(path)
    is_local = isinstance(source, LocalFile)
    return source.child(STATE) if is_local and isfile(join(source.name, STATE)) else source


def _holds_arrays(state: Mapping[str, Any]) -> bool:
    """Whether what the models and optimizers hold are arrays of NumPy's, and no tensors."""
    leaves: list[Any] = []
    map_leaves([state.get("models"), state.get("optimizers")], leaves.append)
    torch = sys.modules.get("torch")
    if torch is not None and any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return False
    return any(isinstance(leaf, np.ndarray) for leaf in leaves)


def _tensors() -> Any:
    """Return the module that reads and writes tensors, for which torch is needed."""
    try:
        from raysgd.checkpoint import tensors
    except ImportError as error:
        raise ImportError(
            f'This checkpoint needs PyTorch ({error}): pip install "raysgd[torch]"'
        ) from error
    return tensors
