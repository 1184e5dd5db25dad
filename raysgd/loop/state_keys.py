"""The keys of the state of a trainer, and how they are checked.

`OperatorRunner._read_state` collects it. Files have the state between calls. A snapshot, from which
new workers restart, also has the unfinished call. Features add keys to those of the models and
optimizers, as schedulers and the loss scaler do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysgd.checkpoint.file import REQUIRED_KEYS
from raysgd.errors import CheckpointError


def entries_for_workers(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what workers load of a state: all without the entries of the driver and of a call."""
    return with_models_last(without_call(state, *DRIVER_KEYS))


def without_call(state: Mapping[str, Any], *more: str) -> dict[str, Any]:
    """Return a state without the call of a snapshot, and without `more` keys."""
    of_call = ("call", "batching", "module_modes")
    return {key: value for key, value in state.items() if key not in (*of_call, *more)}


def with_models_last(state: dict[str, Any]) -> dict[str, Any]:
    """Sort a state, because workers receive the last entries in the memory of their own."""
    last = {key: state.pop(key) for key in ("optimizers", "models") if key in state}
    return state | last


# ---- checks


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**62:
        raise CheckpointError(f"The state's {name} must be a count, but it is {value!r}.")


def _check_dict(name: str, value: Any) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise CheckpointError(f"state[{name!r}] must be a dict, but it is {value!r}.")


def _check_position(name: str, position: Any) -> None:
    if not position:  # a state of RaySGD has only the epoch
        return
    _check_dict(name, position)
    optional = [key for key in ("validation_offset", "seed", "split") if key in position]
    for key in ("epoch", "offset", *optional):
        _check_count(f"{name}[{key!r}]", position.get(key))
    if position.get("split") == 0:
        raise CheckpointError(f"The state's {name}['split'] must be at least 1.")
    _check_dict("loader_seeds", seeds := position.get("loader_seeds", {}))
    for loader, seed in seeds.items():
        _check_count(f"{name}['loader_seeds'][{loader!r}]", seed)


DRIVER_KEYS = ("callbacks", "config", "validation_due", "provenance", "parent")
"""Dicts that only the driver loads."""


def check_state(state: Mapping[str, Any]) -> None:
    """Check the entries of a state, except what the operator, framework, or a feature checks.

    Raises:
        CheckpointError: if an entry is missing or wrong.
    """
    missing = [k for k in REQUIRED_KEYS if not isinstance(state, Mapping) or k not in state]
    if missing:
        raise CheckpointError(f"This is not a trainer state: it lacks {', '.join(missing)}.")
    checks = {
        "epoch": _check_count,
        "global_step": _check_count,
        "data": _check_position,
        "bad_steps": _check_dict,
    }
    for key, check in {**checks, **dict.fromkeys(DRIVER_KEYS, _check_dict)}.items():
        if key in state:
            check(key, state[key])
