"""Requests to workers that write their shards of a PyTorch model."""

from __future__ import annotations

from dataclasses import dataclass

from raysgd._internal.context import Request

__all__ = ["SaveTensorsRequest", "SaveWeightsRequest"]


@dataclass(frozen=True, kw_only=True)
class SaveTensorsRequest(Request):
    """Write this worker's tensors of the state into a file.

    Rank 0 returns the rest of the state, and the hash of the file.
    """

    folder: str


@dataclass(frozen=True, kw_only=True)
class SaveWeightsRequest(Request):
    """Write this worker's parameters of sharded models into a file.

    Rank 0 returns the rest of the models' states, and other names of parameters.
    """

    folder: str
