"""States with NumPy's arrays: a zip archive of bytes and a JSON text that says what they are.

::

    raysgd-state/structure.json     nested containers, numbers and texts; arrays by their number
    raysgd-state/arrays/0           the bytes of an array, in C order

It is read without torch, and nothing in it is ever unpickled.
"""

from __future__ import annotations

import base64
import importlib
import itertools
import json
import zipfile
from collections.abc import Iterator, Mapping
from typing import IO, Any

import numpy as np

from raysgd.checkpoint.checksum import is_archive
from raysgd.checkpoint.location import Location, first_line
from raysgd.errors import CheckpointError

__all__ = ["check_loadable", "read", "write", "wrote"]

_FOLDER = "raysgd-state/"
_STRUCTURE = "structure.json"
_NAMED = "\N{SECTION SIGN}"
"""Key of what JSON has no notation for."""


def wrote(file: IO[bytes]) -> bool:
    """Whether a file, which has been checked, is what `write` made."""
    if not is_archive(file):
        return False
    with zipfile.ZipFile(file) as archive:
        return _FOLDER + _STRUCTURE in archive.namelist()


def write(state: Mapping[str, Any], file: IO[bytes]) -> None:
    """Write a state.

    Raises:
        TypeError: if it holds an object of another type.
    """
    held: list[Any] = []
    structure = _described(state, held)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo(_FOLDER + _STRUCTURE), json.dumps(structure))
        for number, array in enumerate(held):
            content = np.ascontiguousarray(array).tobytes()
            archive.writestr(zipfile.ZipInfo(f"{_FOLDER}arrays/{number}"), content)


def read(source: Location, file: IO[bytes]) -> Any:
    """Read a state.

    Raises:
        CheckpointError: if the file is not what `write` made.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            structure = json.loads(archive.read(_FOLDER + _STRUCTURE))
            return _made(structure, archive, itertools.count())
    except Exception as error:
        raise CheckpointError(
            f"Cannot load {source.shown}: the file is damaged or is not a checkpoint "
            f"({type(error).__name__}: {first_line(error)})."
        ) from error


def check_loadable(owner: str, user_state: Any, target: Location) -> None:
    """Check that the state of an operator or of callbacks can be written."""
    try:
        _described(user_state, [])
    except TypeError as error:
        raise CheckpointError(
            f"Cannot save to {target.shown}: the state_dict() of the {owner} returned what no file "
            f"can hold: {error} Turn it into numbers, strings, lists, dicts or arrays."
        ) from error


def _described(tree: Any, held: list[Any]) -> Any:
    if tree is None or isinstance(tree, bool | int | str):
        return tree
    if isinstance(tree, float):
        return {_NAMED: "float", "value": tree.hex()}
    if isinstance(tree, bytes):
        return {_NAMED: "bytes", "value": base64.b64encode(tree).decode()}
    if isinstance(tree, np.generic):
        return {_NAMED: "number", "value": _described(np.asarray(tree), held)}
    if isinstance(tree, np.ndarray):
        if tree.dtype.hasobject or tree.dtype.names:
            raise TypeError(f"an array of {tree.dtype}.")
        held.append(tree)
        described = {_NAMED: "array", "number": len(held) - 1, "shape": list(tree.shape)}
        return {**described, "dtype": tree.dtype.name if tree.dtype.kind == "V" else tree.dtype.str}
    if isinstance(tree, Mapping):
        items = [[_described(k, held), _described(v, held)] for k, v in tree.items()]
        return {_NAMED: "dict", "items": items}
    if isinstance(tree, tuple):
        return {_NAMED: "tuple", "items": [_described(item, held) for item in tree]}
    if isinstance(tree, list):
        return [_described(item, held) for item in tree]
    raise TypeError(f"a {type(tree).__name__}.")


def _made(structure: Any, archive: zipfile.ZipFile, numbers: Iterator[int]) -> Any:
    """Return what `_described` was given; its arrays come in the order of their `numbers`."""
    if isinstance(structure, list):
        return [_made(item, archive, numbers) for item in structure]
    if not isinstance(structure, dict):
        return structure
    kind = structure[_NAMED]
    if kind == "float":
        return float.fromhex(structure["value"])
    if kind == "bytes":
        return base64.b64decode(structure["value"])
    if kind == "number":
        return _made(structure["value"], archive, numbers)[()]
    if kind == "array":
        if structure["number"] != next(numbers):  # one could be named a million times
            raise ValueError("its arrays are not named once each, in order")
        content = archive.read(f"{_FOLDER}arrays/{structure['number']}")
        array = np.frombuffer(content, _dtype(structure["dtype"]))
        return array.reshape(structure["shape"]).copy()
    if kind == "dict":
        items = structure["items"]
        return {_made(k, archive, numbers): _made(v, archive, numbers) for k, v in items}
    return tuple(_made(item, archive, numbers) for item in structure["items"])


def _dtype(name: str) -> Any:
    """Return a type of NumPy's, or of the package that has bfloat16 and its like."""
    try:
        return np.dtype(name)
    except TypeError:
        return np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
