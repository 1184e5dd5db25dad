"""Nested containers of state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

__all__ = ["deep_copied", "map_leaves"]


def map_leaves(tree: Any, convert: Callable[[Any], Any]) -> Any:
    """Return `tree` with `convert` applied to what its dicts, lists and tuples hold in the end.

    Dicts keep their kind and their attributes: a module's state dict has its version in one.

    >>> map_leaves({"a": [1, (2,)]}, lambda leaf: -leaf)
    {'a': [-1, (-2,)]}
    """
    if isinstance(tree, dict):
        mapped = copy.copy(tree)
        for key, value in tree.items():
            mapped[key] = map_leaves(value, convert)
        return mapped
    if type(tree) in (list, tuple):
        return type(tree)(map_leaves(item, convert) for item in tree)
    return convert(tree)


def deep_copied(leaf: Any) -> Any:
    """Return a copy, or as it is what has none, such as a lock: it cannot be saved either."""
    try:
        return copy.deepcopy(leaf)
    except Exception:
        return leaf
