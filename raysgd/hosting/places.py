"""Counts of epochs and steps in a state, checked before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysgd.errors import CheckpointError

__all__ = ["check_place"]


def check_place(state: Mapping[str, Any]) -> None:
    """Check the counts of epochs and steps in a state.

    Raises:
        CheckpointError: if one of them is no count.
    """
    data = state.get("data") or {}
    counts = {"epoch": state.get("epoch"), "global_step": state.get("global_step", 0)}
    if isinstance(data, Mapping):
        for key in ("epoch", "offset", "validation_offset"):
            counts[f"data[{key!r}]"] = data.get(key, 0)
    else:
        counts["data"] = data
    for key, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise CheckpointError(f"The state's {key} must be a count, but it is {value!r}.")
