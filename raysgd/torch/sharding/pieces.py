"""Pieces of parameters with their optimizer state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

__all__ = [
    "Block",
    "Content",
    "Piece",
    "Slot",
    "cut_like",
    "cut_value",
    "flat",
    "is_dense",
    "is_divided",
    "move_content",
    "rows_of",
    "slot_view",
]


def rows_of(num_rows: int, size: int, rank: int) -> tuple[int, int]:
    """Return the rows of a parameter that ``fully_shard`` gives a rank.

    >>> [rows_of(10, 4, rank) for rank in range(4)]
    [(0, 3), (3, 6), (6, 9), (9, 10)]
    """
    chunk = -(-num_rows // size)
    return min(rank * chunk, num_rows), min((rank + 1) * chunk, num_rows)


@dataclass(eq=False)
class Piece:
    """Consecutive elements of one parameter, in the order of memory."""

    which: int
    """Index of the parameter that the piece belongs to."""
    start: int
    stop: int
    stepped: torch.Tensor
    """The tensor that the optimizer updates, and its key in the state. It has content only within a
    step or while an update is uncommitted."""
    base: torch.Tensor | None = None
    """The current elements if parameters are sharded too."""


@dataclass(eq=False)
class Block:
    """Consecutive elements of all parameters, concatenated, from one source."""

    start: int
    stop: int
    version: int
    """Number of updates of the elements."""
    pieces: list[Piece]


class Slot(NamedTuple):
    """Position of a parameter's elements in the buffer of a share."""

    which: int
    start: int
    stop: int
    place: int
    """Offset in bytes."""


class Content(NamedTuple):
    """The message that transfers a piece."""

    which: int
    start: int
    stop: int
    value: torch.Tensor | None
    """The updated elements if the update is not committed."""
    state: dict[str, Any]
    base: torch.Tensor | None = None
    """The elements if parameters are sharded too."""


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill consecutive memory, in any order of dimensions."""
    if tensor.layout is not torch.strided:
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def flat(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return the elements in the order of memory, or in the memory order of `like`."""
    tensor = tensor.detach()
    if like is not None and tensor.stride() != like.stride():
        ordered = torch.empty_strided(
            like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device
        )
        tensor = ordered.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def slot_view(room: torch.Tensor, slot: Slot, part: Any, dtype: torch.dtype) -> torch.Tensor:
    first = slot.place + (part.start - slot.start) * dtype.itemsize
    return room[first : first + (part.stop - part.start) * dtype.itemsize].view(dtype)


def is_divided(value: Any, length: int) -> bool:
    """Return whether a value of the state has one element per element of a piece."""
    return isinstance(value, torch.Tensor) and value.dim() == 1 and len(value) == length


def move_content(content: Content, device: torch.device) -> Content:
    length = content.stop - content.start
    state = {
        name: value.to(device) if is_divided(value, length) else value
        for name, value in content.state.items()
    }
    value = None if content.value is None else content.value.to(device)
    base = None if content.base is None else content.base.to(device)
    return content._replace(value=value, state=state, base=base)


def cut_value(value: Any, length: int, start: int, stop: int) -> Any:
    """Return a copy of a value of the state, for some elements of a piece."""
    if not isinstance(value, torch.Tensor):
        return value
    return (value[start:stop] if is_divided(value, length) else value).clone()


def cut_like(value: Any, parameter: torch.Tensor, start: int, stop: int) -> Any:
    """Return a copy of a value of the state, for some elements of a parameter."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != parameter.shape:
        return value.clone()
    return flat(value, like=parameter)[start:stop].clone()
