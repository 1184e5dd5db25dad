"""What is in every state, whatever the framework: counts, parts, random number generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from raysgd.errors import CheckpointError

__all__ = ["check_parts", "check_position", "rng_state", "set_rng_state"]


def check_position(state: Mapping[str, Any]) -> None:
    """Check the counts of epochs and steps in a state."""
    data = state.get("data") or {}
    counts = {"epoch": state.get("epoch"), "global_step": state.get("global_step", 0)}
    if not isinstance(data, Mapping):
        raise CheckpointError(f"The state's data must be a dict of counts, but it is {data!r}.")
    if data:
        for key in ("epoch", "offset"):
            counts[f"data[{key!r}]"] = data.get(key)
        counts["data['validation_offset']"] = data.get("validation_offset", 0)
        seeds = data.get("loader_seeds", {})
        if not isinstance(seeds, Mapping):
            raise CheckpointError(
                f"The state's data['loader_seeds'] must be a dict of counts, but it is {seeds!r}."
            )
        counts |= {f"data['loader_seeds'][{name!r}]": seed for name, seed in seeds.items()}
    for key, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise CheckpointError(f"The state's {key} must be a count, but it is {value!r}.")


def check_parts(
    name: str, objects: Sequence[Any], saved: Any, problem_of: Callable[[Any, Any], str]
) -> None:
    """Check the states of all registered models, optimizers or schedulers.

    Args:
        name: which of them.
        objects: what is registered.
        saved: what the state has for them.
        problem_of: says why an object cannot take a state; nothing if it can.
    """
    if not isinstance(saved, list | tuple) or not all(isinstance(s, Mapping) for s in saved):
        raise CheckpointError(f"The state's {name!r} must be a list of state dicts.")
    if len(saved) != len(objects):
        raise CheckpointError(
            f"The state has {len(saved)} {name}, and the operator registered {len(objects)}."
        )
    for index, (own, state) in enumerate(zip(objects, saved, strict=True)):
        if problem := problem_of(own, state):
            raise CheckpointError(
                f"The state is of another trainer: its {name}[{index}] does not fit the registered "
                f"{type(own).__name__}: {problem}."
            )


def rng_state() -> dict[str, Any]:
    """Return the states of this process's generators of Python and NumPy, as plain data."""
    numpy_state: Any = np.random.get_state(legacy=True)
    return {"python": random.getstate(), "numpy": numpy_state}


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Take over what `rng_state` returned, also where tuples and arrays have become others."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, np.uint32), *rest))
