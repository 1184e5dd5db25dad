"""States with tensors, as ``torch.save`` archives. Loading a state runs no code."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import IO, Any

import torch

ADVICE = (
    "Turn it into numbers, strings, lists, dicts or torch tensors, or allow its type with "
    "torch.serialization.add_safe_globals([...]) before saving and before loading."
)


def write(state: Mapping[str, Any], file: IO[bytes]) -> None:
    torch.save(dict(state), file)


def read(file: IO[bytes]) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)


def check_loadable(part: Any) -> None:
    """Raise an error if a part of a state could not be loaded again."""
    buffer = io.BytesIO()
    torch.save(part, buffer)
    buffer.seek(0)
    read(buffer)
