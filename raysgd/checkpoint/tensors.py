"""States with tensors, as ``torch.save`` archives. Loading a state runs no code."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import IO, Any

import torch

from raysgd.checkpoint.location import Location, first_line
from raysgd.errors import CheckpointError

__all__ = ["check_loadable", "read", "write"]

_ALLOW = (
    "Turn it into numbers, strings, lists, dicts or torch tensors, or allow its type with "
    "torch.serialization.add_safe_globals([...]) before saving and before loading."
)


def write(state: Mapping[str, Any], file: IO[bytes]) -> None:
    """Write a state to a file."""
    torch.save(dict(state), file)


def read(source: Location, file: IO[bytes]) -> Any:
    """Read a state from an open file. All errors are CheckpointErrors."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        if "weights_only" in str(error) and "GLOBAL" in str(error):
            raise CheckpointError(
                f"Cannot load {source.shown}: it has objects of a type that is not allowed. "
                f"Loading never runs code from a file. {_ALLOW}\n{_refused_type(error)}"
            ) from error
        # These PyTorch errors advise loading without protection.
        text = "" if "weights_only" in str(error) else f": {first_line(error)}"
        raise CheckpointError(
            f"Cannot load {source.shown}: the file is damaged or is not a checkpoint "
            f"({type(error).__name__}{text})."
        ) from error


def check_loadable(owner: str, user_state: Any, target: Location) -> None:
    """Check that the state of an operator or of callbacks can be loaded again."""
    if user_state is None:
        return
    buffer = io.BytesIO()
    try:
        torch.save(user_state, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"Cannot save to {target.shown}: the result of state_dict() of the {owner} could not "
            f"be loaded again. {_ALLOW}\n{_refused_type(error)}"
        ) from error


def _refused_type(error: BaseException) -> str:
    found = re.search(r"GLOBAL (\S+)", str(error))
    return first_line(error) if found is None else f"It is {found[1]}."
