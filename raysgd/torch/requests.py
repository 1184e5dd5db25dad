"""What the driver asks of workers that write their shards of a PyTorch model themselves."""

from __future__ import annotations

from dataclasses import dataclass

from raysgd._internal.context import Request

__all__ = ["SaveTensorsRequest", "SaveWeightsRequest"]


@dataclass(frozen=True, kw_only=True)
class SaveTensorsRequest(Request):
    """Write the tensors of the state into a file, each worker its part.

    The answer of rank 0 is the rest of the state, and the hash of the file.
    """

    folder: str


@dataclass(frozen=True, kw_only=True)
class SaveWeightsRequest(Request):
    """Write the parameters of sharded models into a file, each worker its part.

    The answer of rank 0 is the rest of the models' states, and other names of parameters.
    """

    folder: str
