"""States with NumPy arrays: an archive of ``numpy.savez``.

Its array ``structure`` is JSON for nested containers, numbers, and texts. The others are the arrays
of the state, by their number. Reading needs no PyTorch and runs no code.
"""

from __future__ import annotations

import base64
import importlib
import itertools
import json
import zipfile
from collections.abc import Callable, Mapping
from typing import IO, Any

import numpy as np

from raysgd.checkpoint.manifest import is_archive


def is_ours(file: IO[bytes]) -> bool:
    """Return whether `write` wrote the file."""
    if not is_archive(file):
        return False
    with zipfile.ZipFile(file) as archive:
        return "structure.npy" in archive.namelist()


def write(state: Mapping[str, Any], file: IO[bytes]) -> None:
    arrays: list[Any] = []
    structure = json.dumps(_encode(state, arrays))
    np.savez(file, structure=structure, **{str(n): array for n, array in enumerate(arrays)})


def read(file: IO[bytes]) -> Any:
    with np.load(file) as archive:
        numbers = itertools.count()
        return _decode(json.loads(str(archive["structure"])), lambda: archive[str(next(numbers))])


def _encode(tree: Any, arrays: list[Any]) -> Any:
    """Return `tree` as JSON, and append its arrays to `arrays`."""
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    if isinstance(tree, bytes):
        return {"bytes": base64.b64encode(tree).decode()}
    if isinstance(tree, np.ndarray):
        if tree.dtype.hasobject or tree.dtype.names:
            raise TypeError(f"the state has an array with the unsupported dtype {tree.dtype}")
        is_foreign = tree.dtype.kind == "V"  # such as bfloat16, which NumPy does not know
        arrays.append(tree.view(f"u{tree.itemsize}") if is_foreign else tree)
        return {"array": tree.dtype.name if is_foreign else None}
    if isinstance(tree, Mapping):
        return {"dict": [[_encode(k, arrays), _encode(v, arrays)] for k, v in tree.items()]}
    if isinstance(tree, list | tuple):
        items = [_encode(item, arrays) for item in tree]
        return items if isinstance(tree, list) else {"tuple": items}
    raise TypeError(
        f"the state has an object of type {type(tree).__name__}. Turn it into numbers, strings, "
        "lists, dicts or arrays."
    )


def _decode(tree: Any, next_array: Callable[[], Any]) -> Any:
    if isinstance(tree, list):
        return [_decode(item, next_array) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind == "bytes":
        return base64.b64decode(value)
    if kind == "array":
        array = next_array()  # bytes, which have no dtype, if the record is damaged
        foreign = value and getattr(importlib.import_module("ml_dtypes"), value)
        return array.view(foreign or array.dtype)
    if kind == "dict":
        return {_decode(k, next_array): _decode(v, next_array) for k, v in value}
    return tuple(_decode(item, next_array) for item in value)
