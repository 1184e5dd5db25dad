"""Merge the shards of all workers into a complete state."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from raysgd.errors import CheckpointError
from raysgd.torch.sharding.pieces import flat, is_divided

__all__ = ["PARAMETER", "gather_state"]

PARAMETER = "parameter"
"""Key of the model parameter in a worker's shard of the state."""


def gather_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a state with the shards of all workers into an unsharded state."""
    merged = dict(state)
    shares = merged.pop("shares", None)
    if shares is None:
        return merged
    count = len(state["optimizers"])
    merged["optimizers"] = [
        {**optimizer, "state": {**optimizer["state"], **_join(itertools.chain(*parts))}}
        for optimizer, *parts in zip(
            state["optimizers"], *(share[:count] for share in shares), strict=True
        )
    ]
    of_models = [share[count:] for share in shares]
    if any(of_models):
        merged["models"] = [
            {**model, **_named(_join(itertools.chain(*parts)))}
            for model, *parts in zip(state["models"], *of_models, strict=True)
        ]
    return merged


def _named(found: Mapping[tuple[str, ...], Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: values[PARAMETER] for names, values in found.items() for name in names}


def _join(parts: Iterable[tuple[Any, ...]]) -> dict[Any, dict[str, Any]]:
    found: dict[Any, dict[str, Any]] = {}
    missing: dict[Any, int] = {}
    for number, start, stop, shape, stride, values in parts:
        of_parameter = found.setdefault(number, {})
        missing[number] = missing.get(number, torch.Size(shape).numel()) - (stop - start)
        for name, value in values.items():
            if not is_divided(value):
                of_parameter[name] = value
                continue
            if name not in of_parameter:
                of_parameter[name] = torch.empty_strided(
                    shape, stride, dtype=value.dtype, device=value.device
                )
            flat(of_parameter[name])[start:stop].copy_(value)
    if any(missing.values()):
        raise CheckpointError("Cannot merge the workers' shards: they have gaps or overlap.")
    return found
