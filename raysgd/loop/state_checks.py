"""Counts of epochs and steps in a state, checked before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysgd.errors import CheckpointError

__all__ = ["check_position"]


def check_position(state: Mapping[str, Any]) -> None:
    """Check the counts of epochs and steps in a state.

    Raises:
        CheckpointError: if one of them is no count.
    """
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
