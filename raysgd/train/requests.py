"""Requests of the driver to the workers of a training function. `FunctionRunner` handles them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raysgd._internal.context import Request
from raysgd.train.session import Plan
from raysgd.train.validation import Reported

__all__ = ["BeginRequest", "CheckpointRequest", "EndRunRequest", "NextRequest"]


@dataclass(frozen=True, kw_only=True)
class BeginRequest(Request):
    """Start the function, unless it is running."""

    plan: Plan


@dataclass(frozen=True, kw_only=True)
class NextRequest(Request):
    """Return the next turn of the function, because the driver has handled the previous one."""

    reported: Sequence[Reported] | None
    """The checkpoints on disk; None if they have not changed."""


@dataclass(frozen=True, kw_only=True)
class CheckpointRequest(Request):
    """Return the checkpoint of a rank; None on other workers, or after a restart."""

    rank: int


class EndRunRequest(Request):
    """Stop the function, and wait until it has ended."""
