"""What the driver asks of the workers of a training function; `FunctionRunner.handle` answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raysgd._internal.context import Request
from raysgd.train.session import Plan
from raysgd.train.validation import Reported

__all__ = ["BeginRequest", "CheckpointRequest", "EndRunRequest", "NextRequest"]


@dataclass(frozen=True, kw_only=True)
class BeginRequest(Request):
    """Start the function, unless it runs."""

    plan: Plan


@dataclass(frozen=True, kw_only=True)
class NextRequest(Request):
    """Return the next result of the function; the one before has been handled."""

    reported: Sequence[Reported] | None
    """Checkpoints that exist now; None if they have not changed."""


@dataclass(frozen=True, kw_only=True)
class CheckpointRequest(Request):
    """Return the checkpoint of a rank; None on other workers, or if the worker restarted."""

    rank: int


class EndRunRequest(Request):
    """Stop the function, and wait until it has ended."""
