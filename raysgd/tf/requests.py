"""What the driver asks of workers of TensorFlow alone."""

from __future__ import annotations

from dataclasses import dataclass

from raysgd.context import Request

__all__ = ["WeightsRequest"]


@dataclass(frozen=True)
class WeightsRequest(Request):
    """Return the models' weights as arrays."""
