"""Requests that the controller itself makes to the runners of its workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raysgd.context import Request

__all__ = ["HeldStateRequest", "LoadRequest", "RestartStateRequest", "TakeHeldRequest"]


@dataclass(frozen=True, kw_only=True)
class LoadRequest(Request):
    """Load a state."""

    state: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RestartStateRequest(Request):
    """Return the state for workers that start from scratch; None if there is none.

    A sharded state is complete only if all `num_workers` workers of the group are asked.
    """

    num_workers: int = 1


class HeldStateRequest(Request):
    """Return the shards that a worker holds."""


@dataclass(frozen=True, kw_only=True)
class TakeHeldRequest(Request):
    """Hold the shards of a worker that leaves."""

    held: Sequence[Any]
