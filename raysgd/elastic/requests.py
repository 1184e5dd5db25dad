"""Requests of the controller to the runners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raysgd._internal.context import Request

__all__ = ["ExportReplicaRequest", "ImportReplicaRequest", "LoadRequest", "RestartStateRequest"]


@dataclass(frozen=True, kw_only=True)
class LoadRequest(Request):
    """Load a state."""

    state: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RestartStateRequest(Request):
    """Return the state for a restart; None without one.

    A sharded state is complete only if all `num_workers` workers are asked.
    """

    num_workers: int = 1


class ExportReplicaRequest(Request):
    """Return the shards that a worker holds, before it leaves."""


@dataclass(frozen=True, kw_only=True)
class ImportReplicaRequest(Request):
    """Store the shards of a worker that leaves."""

    held: Sequence[Any]
