"""One state or one pickle in a file: written whole or not at all, and checked when it is read."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from raysgd._internal.nested import map_leaves
from raysgd.checkpoint import arrays
from raysgd.checkpoint.location import Location, locate
from raysgd.checkpoint.manifest import Manifest, seal, sealed_size, verify
from raysgd.errors import CheckpointError

__all__ = [
    "STATE",
    "TENSORS_FILE",
    "TENSORS_FOLDER",
    "check_writable",
    "prepare_write",
    "read_checkpoint",
    "read_file",
    "read_manifest",
    "read_pickle",
    "write_file",
    "write_pickle",
]

STATE = "state.ckpt"
"""Name of the checkpoint in a folder that workers wrote together."""
TENSORS_FOLDER = re.compile(r"tensors-[0-9a-f]{8}")
"""Name of the folder in that folder that holds the tensors."""
TENSORS_FILE = "model-00001-of-00001.safetensors"
"""The name that torch gives a single file of tensors."""


def check_writable(path: str | os.PathLike[str]) -> str:
    """Return the absolute path, or the URL, if a file can be written there.

    A URL is checked only for a file system that can open it. No server is asked.

    Raises:
        CheckpointError: if its folder is missing or not writable, it is a folder itself, or no
            installed package can open the URL.
    """
    return locate(path).check_writable()


def write_file(
    state: Mapping[str, Any], path: str | os.PathLike[str], manifest: Manifest | None = None
) -> str:
    """Write a state to a path or a URL, replacing a file there.

    The state goes to a temporary name in the same folder, then to the disk, and only then to its
    own name. If the process or the machine stops, `path` holds the old state or the new one.
    ``torch.load`` opens the file, which also holds a manifest: see `read_manifest`.

    Args:
        state: what a trainer's ``state_dict`` returned.
        path: where to write; a URL of any file system that fsspec knows.
        manifest: what to say about the state. The epoch and the step are filled in.

    Returns:
        The absolute path, or the URL.

    Raises:
        CheckpointError: if it cannot be written, or the user's part of it could not be loaded.
    """
    return prepare_write(state, path, manifest)()


def prepare_write(
    state: Mapping[str, Any], path: str | os.PathLike[str], manifest: Manifest | None = None
) -> Callable[[], str]:
    """Check a state as `write_file` does, and return a function that writes it.

    The content of `state` must not change until then.
    """
    target = locate(path)
    if "path" in (state.get("tensors") or ()):
        raise CheckpointError(
            f"Cannot save to {target.shown}: the tensors of this state are in "
            f"{state['tensors']['path']}. Load it with a trainer, and save that."
        )
    # weights_only loading rejects NumPy scalars
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
        seal(file, manifest)

    return functools.partial(target.write, fill)


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a state that `write_file`, or ``torch.save`` of an older library, wrote.

    A folder that workers wrote together holds large tensors in a ``.safetensors`` file, which
    ``state["tensors"]["path"]`` names. A trainer loads them from there.

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
    with source.open(whole=False) as file:
        return verify(file, source.shown, whole=False)


def read_checkpoint(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Manifest | None]:
    """Read a state as `read_file` does, together with its manifest."""
    source = _file_at(path)
    with source.open() as file:
        manifest = verify(file, source.shown)
        # load from the open file, because the name may lead to another file by now
        archive = arrays if arrays.is_ours(file) else _tensors()
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
        state["tensors"] = _checked_tensors(source, state["tensors"])
    return state, manifest


def write_pickle(blob: bytes, path: str | os.PathLike[str], manifest: Manifest) -> str:
    """Write a pickle to a path or a URL. ``pickle.load`` reads the file as well.

    Returns:
        The absolute path, or the URL.

    Raises:
        CheckpointError: if it cannot be written there.
    """

    def fill(file: IO[bytes]) -> None:
        file.write(blob)
        seal(file, manifest)

    return locate(path).write(fill)


def read_pickle(path: str | os.PathLike[str]) -> tuple[bytes, Manifest | None]:
    """Read a file that `write_pickle`, or ``pickle.dump``, wrote, without unpickling it.

    Returns:
        The pickle, and its manifest or None if ``pickle.dump`` wrote the file.

    Raises:
        CheckpointError: if the file is missing, damaged or of a newer format.
    """
    source = locate(path)
    with source.open() as file:
        manifest = verify(file, source.shown)
        size = sealed_size(file) if manifest else -1
        file.seek(0)
        blob = file.read(size)
    if not blob.endswith(b"."):  # the last byte of every pickle
        raise CheckpointError(
            f"Cannot load {source.shown}: the file is damaged or is not a checkpoint: it is no "
            "pickle, or was cut off."
        )
    return blob, manifest


def _file_at(path: str | os.PathLike[str]) -> Location:
    """Return the file to read. In a folder that workers wrote together, it is the checkpoint."""
    source = locate(path)
    is_folder = source.is_local and os.path.isfile(f"{source.name}/{STATE}")
    return source.child(STATE) if is_folder else source


def _checked_tensors(source: Location, entry: Any) -> dict[str, str]:
    """Return the path of the tensors that a state names, after a check of their hash.

    Raises:
        CheckpointError: if they are missing or damaged.
    """
    name = entry.get("file") if isinstance(entry, dict) else None
    folder, _, file = name.partition("/") if isinstance(name, str) else ("", "", "")
    if not TENSORS_FOLDER.fullmatch(folder) or file != TENSORS_FILE:
        raise CheckpointError(f"Cannot load {source.shown}: it names no file of its tensors.")
    path = Path(source.name).parent / folder / file
    try:
        with path.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"Cannot load {source.shown}: its tensors: {error}") from error
    if found != entry.get("sha256"):
        raise CheckpointError(f"Cannot load {source.shown}: {path} is damaged.")
    return {"path": str(path)}


def _holds_arrays(state: Mapping[str, Any]) -> bool:
    """Return whether the models and optimizers hold NumPy arrays and no tensors."""
    leaves: list[Any] = []
    map_leaves([state.get("models"), state.get("optimizers")], leaves.append)
    torch = sys.modules.get("torch")
    if torch is not None and any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return False
    return any(isinstance(leaf, np.ndarray) for leaf in leaves)


def _tensors() -> Any:
    """Return the module that reads and writes tensors. It needs torch."""
    try:
        from raysgd.checkpoint import tensors
    except ImportError as error:
        raise ImportError(
            f'This checkpoint needs PyTorch ({error}): pip install "raysgd[torch]"'
        ) from error
    return tensors
