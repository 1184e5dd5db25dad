"""Log the norms of gradients before clipping."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raysgd.loop.feature import StepFeature

if TYPE_CHECKING:
    import torch

    from raysgd.torch.train_state import TorchTrainState

__all__ = ["GradientNorms"]


class GradientNorms(StepFeature):
    """Adds ``grad_norm`` of each optimizer to the metrics of logged steps."""

    def __init__(self, state: TorchTrainState) -> None:
        self._state = state
        self._is_wanted = False
        self._norms: dict[int, torch.Tensor] = {}

    def begin_call(self, logs_steps: bool) -> None:
        self._is_wanted = logs_steps
        if not logs_steps:
            self._norms.clear()

    def before_update(self, optimizer: Any) -> None:
        if self._is_wanted:
            _, self._norms[id(optimizer)] = self._state.optimization.gradients(optimizer)

    def step_metrics(self) -> dict[str, float]:
        norms = [self._norms.get(id(optimizer)) for optimizer in self._state.optimizers]
        return {
            "grad_norm" if len(norms) == 1 else f"grad_norm-{number}": float(norm)
            for number, norm in enumerate(norms)
            if norm is not None
        }
