"""Clip the gradients of each optimizer by their norm."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from raysgd.loop.feature import StepFeature

if TYPE_CHECKING:
    from raysgd.torch.optimization import Optimization

__all__ = ["Clipping"]


class Clipping(StepFeature):
    """Clips to ``max_grad_norm`` of ``register``."""

    def __init__(self, optimization: Optimization, max_norm: Any) -> None:
        if max_norm is not None:
            if isinstance(max_norm, bool) or not isinstance(max_norm, int | float):
                raise TypeError(f"register(max_grad_norm={max_norm!r}): must be a number or None.")
            if not 0 < max_norm < math.inf:
                raise ValueError(
                    f"register(max_grad_norm={max_norm!r}): must be above 0 and finite."
                )
            self.needs_helper = f"max_grad_norm={max_norm}"
        self._optimization, self._max_norm = optimization, max_norm

    def before_update(self, optimizer: Any) -> None:
        if self._max_norm is not None:
            held, norm = self._optimization.gradients(optimizer)
            torch.nn.utils.clip_grads_with_norm_(held, self._max_norm, norm)
