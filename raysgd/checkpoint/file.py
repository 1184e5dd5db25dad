"""Files with one state or one pickle. Writes are atomic, and reads verify the content."""

import dataclasses
import io
import os
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import IO, Any

import numpy as np

from raysgd._internal.imports import import_extra
from raysgd._internal.nested import map_leaves
from raysgd._internal.nonfinite import find_nonfinite, named_arrays
from raysgd.checkpoint import arrays
from raysgd.checkpoint.location import Location, first_line
from raysgd.checkpoint.manifest import HashingFile, Manifest, is_archive, unsealed_size, verify
from raysgd.errors import CheckpointError

REQUIRED_KEYS = ("models", "optimizers", "epoch")
"""Keys that the state of every trainer has."""
_ADVICE = (
    "Turn it into numbers, strings, lists, dicts or torch tensors (a NumPy array: "
    "torch.from_numpy(array) or array.tolist()), or allow its type with "
    "torch.serialization.add_safe_globals([...]) before saving and before loading."
)


class NonFiniteError(CheckpointError):
    """A state has NaN or infinity, so it must not replace a finite one."""


def write_file(
    state: Mapping[str, Any], path: str | os.PathLike[str], manifest: Manifest | None = None
) -> str:
    """Write a state to a path or a URL, and replace an existing file.

    If the process or the machine stops, `path` holds the old state or the new one. ``torch.load``
    opens the file, which also has a manifest: see `read_manifest`.

    Args:
        state: result of a trainer's ``state_dict``.
        path: where to write: a path, or a URL for fsspec.
        manifest: describes the state. This function adds the epoch, the step, and the provenance.

    Returns:
        The absolute path, or the URL.

    Raises:
        CheckpointError: if the state cannot be written, could not be loaded again, or has NaN or
            infinity in models, optimizers, or averages.
    """
    target = Location(path)
    manifest = dataclasses.replace(manifest or Manifest(), **manifest_entries(state))
    return _write(target, manifest, lambda file: write_state(state, target.label, file))


def manifest_entries(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a manifest that the state has."""
    counts = {key: _loadable(state.get(key, 0)) for key in ("epoch", "global_step")}
    provenance, data = state.get("provenance", {}), state.get("data", {})
    known = {key: data[key] for key in ("seed", "loaders") if provenance and key in data}
    return {**counts, "provenance": {**provenance, **known}}


def _write(target: Location, manifest: Manifest, write: Callable[[Any], Any]) -> str:
    def fill(file: IO[bytes]) -> None:
        hashing = HashingFile(file)
        write(hashing)
        hashing.seal(manifest)

    return target.write(fill)


def write_state(state: Mapping[str, Any], label: str, file: IO[bytes]) -> None:
    """Write a state to a file that is only open for writing. `label` is its name in messages."""
    if bad := find_nonfinite(state):
        raise NonFiniteError(
            f"The state of step {state.get('global_step')} is not saved to {label}, because {bad} "
            "has NaN or infinity. Earlier checkpoints stay."
        )
    state = map_leaves(dict(state), _loadable)
    found = [each for _, each in named_arrays([state.get("models"), state.get("optimizers")])]
    if found and all(isinstance(each, np.ndarray) for each in found):  # and no tensors
        arrays.write(state, file)
        return
    operator = f"operator on worker 0 after step {state.get('global_step')}"
    checked = {
        operator: state.get("operator"),
        "callbacks": state.get("callbacks"),
        "models": _without_tensors(state.get("models")),
        "optimizers": _without_tensors(state.get("optimizers")),
        "schedulers": state.get("schedulers"),
    }
    for owner, own in checked.items():
        if refused := _find_unloadable(own, "state_dict()"):
            raise CheckpointError(
                f"Cannot save to {label}: the result of state_dict() of the {owner} could not be "
                f"loaded again: {refused}. {_ADVICE}"
            )
    _torch().save(state, file)


def _loadable(leaf: Any) -> Any:
    """Convert NumPy scalars and metrics to plain numbers, because loading rejects other types."""
    if isinstance(leaf, np.generic):
        return leaf.item()
    return float(leaf) if isinstance(leaf, float) else leaf


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a state that `write_file`, or ``torch.save`` of an older library, wrote.

    Raises:
        CheckpointError: if the file is missing, damaged, of a newer format, not a state, or has
            objects that ``torch.load(weights_only=True)`` rejects.
    """
    return read_checkpoint(path)[0]


def read_manifest(path: str | os.PathLike[str]) -> Manifest | None:
    """Read the manifest of a file without reading or verifying its state.

    Returns:
        None for a file of an older library.

    Raises:
        CheckpointError: if the file is missing, of a newer format, or its end is damaged.
    """
    source = Location(path)
    with source.open(downloads=False) as file:
        return verify(file, source.label, checks_content=False)


def read_checkpoint(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Manifest | None]:
    """Read a state as `read_file` does, and its manifest."""
    source = Location(path)
    with source.open() as file:
        return _read(file, source.label, _load)


class CheckpointFile:
    """A file with a state. It can be read again, even if another file has its name by then."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        source = Location(path)
        self._label = source.label
        with source.open() as file:
            self._file = os.fdopen(os.dup(file.fileno()), "rb")
        weakref.finalize(self, self._file.close)

    def read(self) -> dict[str, Any]:
        """Return the state of `read_file`, with this file as parent. Tensors are pages of it."""
        return {**_read(self._file, self._label, _load_mapped)[0], "parent": {"path": self._label}}


def _read(
    file: IO[bytes], label: str, load: Callable[[IO[bytes]], Any]
) -> tuple[dict[str, Any], Manifest | None]:
    manifest = verify(file, label)
    # Load from the open file, because the path may lead to another file by now.
    read = arrays.read if arrays.is_array_file(file) else load
    file.seek(0)
    try:
        state = read(file)
    except Exception as error:
        reason = _describe(error)
        raise CheckpointError(
            f"Cannot load {label}: {reason}. Loading never runs code. {_ADVICE}"
            if "not allowed" in reason
            else f"Cannot load {label}: the file is damaged or is not a checkpoint ({reason})."
        ) from error
    content = state if isinstance(state, dict) else {}
    if missing := [key for key in REQUIRED_KEYS if key not in content]:
        raise CheckpointError(
            f"Cannot load {label}: it is not the state of a trainer, because it has no "
            f"{', '.join(missing)}. Write a state with trainer.save(path)."
        )
    return state, manifest


def _without_tensors(tree: Any) -> Any:
    if type(tree) in (dict, OrderedDict):
        return {key: _without_tensors(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(_without_tensors, tree))
    return None if isinstance(tree, _torch().Tensor) else tree


def _find_unloadable(tree: Any, key: str) -> str:
    """Return the key and the type of the first value that cannot be loaded again, or ""."""
    try:
        _torch().save(tree, buffer := io.BytesIO())
        buffer.seek(0)
        _load(buffer)
    except Exception:
        items: Any = tree.items() if isinstance(tree, dict) else ()
        items = enumerate(tree) if isinstance(tree, list | tuple) else items
        inner = (_find_unloadable(value, f"{key}[{name!r}]") for name, value in items)
        kind = f"{type(tree).__module__}.{type(tree).__qualname__}"
        return next(filter(None, inner), f"{key} has the type {kind}")
    return ""


def _describe(error: Exception) -> str:
    """Describe an error of an archive, without PyTorch's advice to disable `weights_only`."""
    if refused := re.search(r"GLOBAL (\S+)", str(error)):
        return f"it has an object of type {refused[1]}, which is not allowed"
    name = type(error).__name__
    return name if "weights_only" in str(error) else f"{name}: {first_line(error)}"


def write_pickle(blob: bytes, path: str | os.PathLike[str], manifest: Manifest) -> str:
    """Write a pickle, which ``pickle.load`` can read, and return its path or URL."""
    return _write(Location(path), manifest, lambda file: file.write(blob))


def read_pickle(path: str | os.PathLike[str]) -> tuple[bytes, Manifest | None]:
    """Return a pickle, and its manifest, or None if ``pickle.dump`` wrote the file."""
    source = Location(path)
    with source.open() as file:
        manifest = verify(file, source.label)
        size = unsealed_size(file) if manifest else -1
        file.seek(0)
        blob = file.read(size)
    if not blob.endswith(b"."):  # the last byte of every pickle
        raise CheckpointError(
            f"Cannot load {source.label}: the file is damaged or is not a checkpoint: it "
            "does not end like a pickle."
        )
    return blob, manifest


def _torch() -> Any:
    return import_extra("This checkpoint", "torch", "torch")


def _load(file: Any, **options: Any) -> Any:
    return _torch().load(file, map_location="cpu", weights_only=True, **options)


def _load_mapped(file: IO[bytes]) -> Any:
    if not is_archive(file):  # a file of an old PyTorch
        file.seek(0)
        return _load(file)
    return _load(f"/proc/self/fd/{file.fileno()}", mmap=True)  # only a path can be mapped
