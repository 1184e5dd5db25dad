"""States with tensors of torch: the archive of ``torch.save``, of which no code is run."""

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


_BEGINNINGS = (b"PK", b"\x80\x02")
"""Of what ``torch.save`` writes: a zip file, and in its older format a pickle of protocol 2."""


def write(state: Mapping[str, Any], file: IO[bytes]) -> None:
    """Write a state."""
    torch.save(dict(state), file)


def read(source: Location, file: IO[bytes]) -> Any:
    """Read a state.

    Raises:
        CheckpointError: if it is damaged, or holds objects of a type that is not allowed.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        if "weights_only" in str(error) and "GLOBAL" in str(error):
            raise CheckpointError(
                f"Cannot load {source.shown}: it holds objects of a type that is not allowed, and "
                f"loading never runs code from a file. {_ALLOW}\n{_refused(error)}"
            ) from error
        raise CheckpointError(
            f"Cannot load {source.shown}: the file is damaged or is not a checkpoint "
            f"({_problem(file, error)})."
        ) from error


def _problem(file: IO[bytes], error: BaseException) -> str:
    """Say why torch cannot read a file, in words that tell a user something."""
    if file.seek(0, io.SEEK_END) == 0:
        return "it is empty"
    file.seek(0)
    if not file.read(2).startswith(_BEGINNINGS):  # torch reads some bytes, until it stumbles
        return "torch.save has not written it"
    # torch's own words advise to load without protection
    said = "" if "weights_only" in str(error) else f": {first_line(error)}"
    return f"{type(error).__name__}{said}"


def check_loadable(owner: str, user_state: Any, target: Location) -> None:
    """Check that the state of an operator or of callbacks will load again: find out now."""
    if user_state is None:
        return
    buffer = io.BytesIO()
    try:
        torch.save(user_state, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        whose = f"{owner}'" if owner.endswith("s") else f"{owner}'s"
        raise CheckpointError(
            f"Cannot save to {target.shown}: what the {whose} state_dict() returned could not be "
            f"loaded again. {_ALLOW}\n{_refused(error)}"
        ) from error


def _refused(error: BaseException) -> str:
    """Return what torch says of the type that it refuses, without its advice."""
    found = re.search(r"GLOBAL (\S+)", str(error))
    return first_line(error) if found is None else f"It is {found[1]}."
