"""Copies of state as arrays, and random number generators as plain data."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from raysgd.trees import map_leaves

__all__ = ["copied_tree", "rng_state", "set_rng_state"]


def copied_tree(tree: Any) -> Any:
    """Return a copy of nested containers in which nothing changes; tensors become arrays."""

    def copied(leaf: Any) -> Any:
        if hasattr(leaf, "__array__") and not isinstance(leaf, np.ndarray | np.generic):
            # NumPy warns of what TensorFlow's variables do when it is asked for a copy
            return np.array(leaf.numpy() if hasattr(leaf, "numpy") else leaf)
        try:
            return copy.deepcopy(leaf)
        except TypeError:  # a lock or the like, which could not be saved either
            return leaf

    return map_leaves(tree, copied)


def rng_state() -> dict[str, Any]:
    """Return the states of this process's generators of Python and NumPy."""
    numpy_state: Any = np.random.get_state(legacy=True)
    return {"python": random.getstate(), "numpy": numpy_state}


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Take over what `rng_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, np.uint32), *rest))
