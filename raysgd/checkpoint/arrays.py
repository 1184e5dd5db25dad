"""States with NumPy arrays: a zip archive of the arrays' bytes, and JSON for all else.

::

    raysgd-state/structure.json     nested containers, numbers, and texts
    raysgd-state/arrays/0           the bytes of the first array of the state, in C order

Reading needs no PyTorch and runs no code.
"""

import base64
import importlib
import itertools
import json
import zipfile
from collections.abc import Callable, Mapping
from typing import IO, Any

import numpy as np

from raysgd.checkpoint.manifest import is_archive

_STRUCTURE = "raysgd-state/structure.json"
_ARRAY = "raysgd-state/arrays/{}"


def is_array_file(file: IO[bytes]) -> bool:
    """Return whether the archive has the format of `write`. `verify` checks its hash."""
    if not is_archive(file):
        return False
    with zipfile.ZipFile(file) as archive:
        return _STRUCTURE in archive.namelist()


def write(state: Mapping[str, Any], file: IO[bytes]) -> None:
    arrays: list[Any] = []
    structure = json.dumps(_encode(state, arrays))
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo(_STRUCTURE), structure)
        for number, array in enumerate(arrays):
            content = np.ascontiguousarray(array).tobytes()
            archive.writestr(zipfile.ZipInfo(_ARRAY.format(number)), content)


def read(file: IO[bytes]) -> Any:
    with zipfile.ZipFile(file) as archive:
        numbers = itertools.count()
        structure = json.loads(archive.read(_STRUCTURE))
        return _decode(structure, lambda: archive.read(_ARRAY.format(next(numbers))))


def _encode(tree: Any, arrays: list[Any]) -> Any:
    """Return `tree` as JSON, and append its arrays to `arrays`."""
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    if isinstance(tree, bytes):
        return {"bytes": base64.b64encode(tree).decode()}
    if isinstance(tree, np.ndarray):
        if tree.dtype.hasobject or tree.dtype.names:
            raise TypeError(f"the state has an array with the unsupported dtype {tree.dtype}")
        arrays.append(tree)
        # only its name identifies a type of another package, such as bfloat16
        dtype = tree.dtype.name if tree.dtype.isbuiltin == 2 else tree.dtype.str
        return {"array": [dtype, tree.shape]}
    if isinstance(tree, Mapping):
        return {"dict": [[_encode(k, arrays), _encode(v, arrays)] for k, v in tree.items()]}
    if isinstance(tree, list | tuple):
        items = [_encode(item, arrays) for item in tree]
        return items if isinstance(tree, list) else {"tuple": items}
    raise TypeError(
        f"the state has an object of type {type(tree).__name__}. Turn it into numbers, strings, "
        "lists, dicts or arrays."
    )


def _decode(tree: Any, next_array: Callable[[], bytes]) -> Any:
    if isinstance(tree, list):
        return [_decode(item, next_array) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind == "bytes":
        return base64.b64decode(value)
    if kind == "array":
        dtype, shape = value
        return np.frombuffer(next_array(), _dtype(dtype)).reshape(shape).copy()
    if kind == "dict":
        return {_decode(k, next_array): _decode(v, next_array) for k, v in value}
    return tuple(_decode(item, next_array) for item in value)


def _dtype(name: str) -> Any:
    try:
        return np.dtype(name)
    except TypeError:
        return np.dtype(getattr(importlib.import_module("ml_dtypes"), name))  # such as bfloat16
