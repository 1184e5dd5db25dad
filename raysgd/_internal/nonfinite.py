"""Whether states and losses are finite."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

_TRAINED = ("models", "optimizers", "averages")
_PLAIN = (int, float, complex, str, bytes, np.generic, type(None))


def find_nonfinite(state: Mapping[str, Any]) -> str:
    """Return the name of the first array of a state with NaN or infinity, or an empty string.

    Ignore numbers, and buffers and frozen parameters that were not finite before training, such as
    masks.
    """
    bad = nonfinite_arrays({key: state[key] for key in _TRAINED if key in state})
    return next((name for name in bad if name not in state.get("not_finite", ())), "")


def nonfinite_arrays(tree: Any) -> Iterator[str]:
    """Yield the names of the arrays in a tree that have NaN or infinity."""
    return (name for name, array in named_arrays(tree) if is_nonfinite(array))


def named_arrays(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the arrays and tensors in a tree, each with its name."""
    if isinstance(tree, Mapping | list | tuple):
        values = tree.values() if isinstance(tree, Mapping) else tree
        if all(issubclass(kind, _PLAIN) for kind in set(map(type, values))):
            return  # a history may have a million numbers
    if isinstance(tree, Mapping):
        for key, each in tree.items():
            yield from named_arrays(each, f"{name}.{key}" if name else str(key))
    elif isinstance(tree, list | tuple):
        for index, each in enumerate(tree):
            yield from named_arrays(each, f"{name}[{index}]")
    elif isinstance(tree, np.ndarray) or hasattr(tree, "isfinite"):
        yield name, tree


def is_nonfinite(array: Any) -> bool:
    """Return whether an array or a tensor has NaN or infinity."""
    try:
        if isinstance(array, np.ndarray):
            return not np.isfinite(array).all()
        if hasattr(array, "to_local"):  # a shard; the whole needs the other workers
            array = array.to_local()
        # a sum is quick, and finite only if its terms are
        return not (array.sum().isfinite() or array.isfinite().all())
    except Exception:  # of a type without this method, such as a sparse tensor
        return False


Finiteness = dict[str, tuple[Any, bool]]
"""The shape of each array that has one, and whether it is finite, by name."""


def finiteness(state: Any) -> Finiteness:
    found = {}
    with contextlib.suppress(RecursionError):  # a state that contains itself
        for name, each in named_arrays(state):
            with contextlib.suppress(Exception):  # of a tensor without a shape, such as a lazy one
                found[name] = each.shape, not is_nonfinite(each)
    return found


def find_newly_nonfinite(arrays: Finiteness, earlier: Finiteness) -> str:
    """Return the name of an array with NaN or infinity that was finite earlier, or "".

    A history that has grown may have NaN, such as the AUC of one class.
    """
    bad = (name for name, (_, is_finite) in arrays.items() if not is_finite)
    return next((name for name in bad if earlier.get(name) == (arrays[name][0], True)), "")


def nonfinite_loss(metrics: Mapping[str, Any]) -> str:
    """Return the first loss that is NaN or infinite, as "train_loss is nan", or ""."""
    for name, value in metrics.items() if metrics.get("num_samples") != 0 else ():
        is_loss = "loss" in name.lower() and not name.startswith("last_")  # may have no weight
        if is_loss and isinstance(value, float) and not math.isfinite(value):
            return f"{name} is {value}"
    return ""
