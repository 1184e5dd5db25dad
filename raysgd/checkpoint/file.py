"""One state in one file: written whole or not at all, and read without running code from it."""

from __future__ import annotations

import dataclasses
import functools
import io
import os
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

import numpy as np
import torch

from raysgd.checkpoint.checked import checked_manifest
from raysgd.checkpoint.location import Location, first_line, locate
from raysgd.checkpoint.manifest import Manifest
from raysgd.checkpoint.seal import seal
from raysgd.errors import CheckpointError
from raysgd.trees import map_leaves

__all__ = [
    "check_writable",
    "prepare_write",
    "read_checkpoint",
    "read_file",
    "read_manifest",
    "write_file",
]

_ALLOW = (
    "Turn it into numbers, strings, lists, dicts or torch tensors, or allow its type with "
    "torch.serialization.add_safe_globals([...]) before saving and before loading."
)


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
    target.check_writable()
    # numpy's numbers do not load without being allowed, and Python's do
    state = map_leaves(dict(state), lambda x: x.item() if isinstance(x, np.generic) else x)
    _check_loadable("the operator's state_dict()", state.get("operator"), target)
    _check_loadable("the callbacks' state_dict()", state.get("callbacks"), target)
    manifest = dataclasses.replace(
        manifest or Manifest(),
        epoch=state.get("epoch", 0),
        global_step=state.get("global_step", 0),
    )

    def fill(file: IO[bytes]) -> None:
        torch.save(state, file)
        seal(file, manifest, _record_names(state))

    return functools.partial(target.write, fill)


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a state that `write_file`, or ``torch.save`` of an older library, wrote.

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
    source = locate(path)
    return source.inspect(lambda file: checked_manifest(source, file, whole=False))


def read_checkpoint(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Manifest | None]:
    """Read a state as `read_file` does, together with its manifest."""
    source = locate(path)
    with source.open() as file:
        manifest = checked_manifest(source, file, whole=True)
        # through the file that was checked: another may have the name by now
        file.seek(0)
        state = _loaded(source, file)
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
    return state, manifest


def _loaded(source: Location, file: IO[bytes]) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        if "weights_only" in str(error) and "GLOBAL" in str(error):
            raise CheckpointError(
                f"Cannot load {source.shown}: it holds objects of a type that is not allowed, and "
                f"loading never runs code from a file. {_ALLOW}\n{first_line(error)}"
            ) from error
        # torch's own words advise to load without protection
        said = "" if "weights_only" in str(error) else f": {first_line(error)}"
        raise CheckpointError(
            f"Cannot load {source.shown}: the file is damaged or is not a checkpoint "
            f"({type(error).__name__}{said})."
        ) from error


def _check_loadable(source: str, user_state: Any, target: Location) -> None:
    """Check that the user's own state will load again: find out now, not when it is needed."""
    if user_state is None:
        return
    buffer = io.BytesIO()
    try:
        torch.save(user_state, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"Cannot save to {target.shown}: what {source} returned could not be loaded again. "
            f"{_ALLOW}\n{first_line(error)}"
        ) from error


def _record_names(state: Mapping[str, Any]) -> dict[str, str]:
    """Return what the records hold; those of tensors are numbered as ``torch.save`` meets them.

    An object that has tensors of its own shifts the numbers of those that follow; so the names
    are for messages, and nothing depends on them.
    """
    names: dict[int, str] = {}
    for name, tensor in _tensors(state, ""):
        if tensor.layout is not torch.strided:
            break  # several storages, in an order of its own
        names.setdefault(tensor.untyped_storage()._cdata, name)
    return {
        "data.pkl": "structure",
        **{f"data/{number}": name for number, name in enumerate(names.values())},
    }


def _tensors(tree: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _tensors(value, f"{path}/{key}" if path else str(key))
    elif isinstance(tree, list | tuple):
        for place, value in enumerate(tree):
            yield from _tensors(value, f"{path}/{place}")
