"""Pieces of parameters with their optimizer state, and how they form complete states."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from raysgd._internal.nested import map_leaves
from raysgd.errors import CheckpointError
from raysgd.torch.state import copy_leaf

PARAMETER = "parameter"
"""Key of the model parameter in a worker's shard of the state."""


@dataclass(eq=False)
class Piece:
    """Consecutive elements of one parameter."""

    which: int
    """Index of the parameter that the piece belongs to."""
    start: int
    stop: int
    version: int
    """Number of updates of the elements."""
    state: dict[str, Any]
    """State of the elements in the optimizer."""
    value: torch.Tensor | None = None
    """The updated elements, within a step and until the update is committed."""
    base: torch.Tensor | None = None
    """The elements before the update. None if this worker has the complete parameter."""

    def message(self, start: int, stop: int, is_ahead: bool) -> tuple[Any, ...]:
        """Return a copy of some elements, as the fields of a piece.

        Include the updated elements if they are ahead of the receiver's parameters.
        """
        first, last = start - self.start, stop - self.start
        state = {
            name: copy_leaf(value[first:last] if is_divided(value) else value)
            for name, value in self.state.items()
        }
        value = self.value[first:last].clone() if is_ahead and self.value is not None else None
        base = None if self.base is None else self.base[first:last].clone()
        return self.which, start, stop, self.version, state, value, base


def on_device(message: tuple[Any, ...], device: torch.device) -> Piece:
    """Return the piece of a message. Values that are not divided, such as steps, stay."""
    return Piece(*map_leaves(message, lambda x: x.to(device) if is_divided(x) else x))


def is_divided(value: Any) -> bool:
    """Return whether a value of a piece has an entry per element. Other values are scalars."""
    return isinstance(value, torch.Tensor) and value.dim() == 1


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a contiguous tensor, without a copy."""
    return tensor.detach().view(-1)


def elements_of(value: Any, parameter: torch.Tensor, start: int, stop: int) -> Any:
    """Return a copy of a value of the state, for some elements of a parameter."""
    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
        value = value.reshape(-1)[start:stop]
    return copy_leaf(value)


# ---- complete states


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
    for number, start, stop, shape, values in parts:
        of_parameter = found.setdefault(number, {})
        missing[number] = missing.get(number, torch.Size(shape).numel()) - (stop - start)
        for name, value in values.items():
            if not is_divided(value):
                of_parameter[name] = value
                continue
            if name not in of_parameter:
                of_parameter[name] = value.new_empty(shape)
            flat(of_parameter[name])[start:stop].copy_(value)
    if any(missing.values()):
        raise CheckpointError("Cannot merge the workers' shards: they have gaps or overlap.")
    return found
