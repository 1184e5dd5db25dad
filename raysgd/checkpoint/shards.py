"""Collect and merge the shards of all workers in a state."""

import copy
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from raysgd.errors import CheckpointError

SHARDS = "shards"
"""Key of the shards of models and optimizers: of one worker, or of all in a list by rank. No file
has it, because the driver merges shards before it writes a state."""
PARAMETER = "parameter"
"""Key of the model parameter in a worker's shard of the state."""


class SavedPiece(TypedDict):
    """A piece in a state that a worker sends."""

    number: int | None  # of the parameter in the optimizer, if that has it
    names: Sequence[tuple[int, str]]  # of a sharded parameter: models by index, and names there
    start: int
    stop: int
    shape: tuple[int, ...]  # of the parameter
    values: dict[str, Any]  # of the optimizer; with `names`, the elements too, as `PARAMETER`


def collect_shards(states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the state of rank 0 with the shards of all ranks."""
    state = states[0]
    if not isinstance(state, Mapping) or SHARDS not in state:
        return state
    return {**state, SHARDS: [each[SHARDS] for each in states]}


def merge_shards(state: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a state with the shards of all workers into an unsharded state."""
    merged = dict(state)
    if (shards := merged.pop(SHARDS, None)) is None:
        return merged
    merged["optimizers"] = [{**saved, "state": {**saved["state"]}} for saved in state["optimizers"]]
    merged["models"] = [copy.copy(model) for model in state.get("models", ())]
    for optimizer, *pieces in zip(merged["optimizers"], *shards, strict=True):
        for (number, names), values in _merge_pieces(itertools.chain(*pieces)).items():
            for index, name in names:
                merged["models"][index][name] = values[PARAMETER]
            if entries := {key: value for key, value in values.items() if key != PARAMETER}:
                optimizer["state"][number] = entries
    return merged


def _merge_pieces(pieces: Iterable[SavedPiece]) -> dict[Any, dict[str, Any]]:
    merged: dict[Any, dict[str, Any]] = {}
    missing: dict[Any, int] = {}
    for piece in pieces:
        key, shape = (piece["number"], piece["names"]), piece["shape"]
        values = merged.setdefault(key, {})
        missing[key] = missing.get(key, math.prod(shape)) - (piece["stop"] - piece["start"])
        for name, value in piece["values"].items():
            if getattr(value, "ndim", 0) != 1:  # a scalar, and not an entry per element
                values[name] = value
                continue
            if name not in values:
                values[name] = value.new_empty(shape)
            values[name].view(-1)[piece["start"] : piece["stop"]] = value
    if any(missing.values()):
        raise CheckpointError("Cannot merge the workers' shards: they have gaps or overlap.")
    return merged
