"""Whether states and losses are finite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

_TRAINED = ("models", "optimizers", "averages")


def not_finite(state: Mapping[str, Any]) -> str:
    """Return the name of the first array of a state with NaN or infinity, or an empty string.

    Ignore numbers, and buffers and frozen parameters that were not finite before training, such as
    masks.
    """
    known = state.get("not_finite", ())
    bad = bad_arrays({key: state[key] for key in _TRAINED if key in state})
    return next((name for name in bad if name not in known), "")


def bad_arrays(tree: Any, name: str = "") -> Iterator[str]:
    """Yield the names of the arrays in a tree that have NaN or infinity."""
    if isinstance(tree, Mapping):
        for key, each in tree.items():
            yield from bad_arrays(each, f"{name}.{key}" if name else str(key))
    elif isinstance(tree, list | tuple):
        for index, each in enumerate(tree):
            yield from bad_arrays(each, f"{name}[{index}]")
    elif isinstance(tree, np.ndarray) or hasattr(tree, "isfinite"):
        try:
            if isinstance(tree, np.ndarray):
                is_bad = not np.isfinite(tree).all()
            else:  # a sum is quick, and finite only if its terms are
                is_bad = not (tree.sum().isfinite() or tree.isfinite().all())
        except Exception:  # of a type without this method, such as a sparse tensor
            return
        if is_bad:
            yield name


def bad_loss(metrics: Mapping[str, Any]) -> str:
    """Return the first loss that is NaN or infinite, as "train_loss is nan", or ""."""
    for name, value in metrics.items():
        is_loss = "loss" in name and not name.startswith("last_")  # that may have no weight
        if is_loss and isinstance(value, float) and not math.isfinite(value):
            return f"{name} is {value}"
    return ""
