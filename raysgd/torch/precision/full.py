"""The precision that models are made in, float32 as a rule."""

from __future__ import annotations

from typing import ClassVar

import torch

from raysgd.torch.precision.base import Precision

__all__ = ["FullPrecision"]


class FullPrecision(Precision):
    """Computes as plain torch does."""

    name: ClassVar[str] = "full precision (use_fp16=False)"

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """Add the gradients of `loss` to those there are."""
        loss.backward()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the parameters."""
        optimizer.step()
