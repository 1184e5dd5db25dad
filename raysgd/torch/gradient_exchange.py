"""How the workers combine their gradients."""

from __future__ import annotations

from typing import Any

import torch

from raysgd.loop.feature import StepFeature


class GradientExchange(StepFeature):
    """Exchanges gradients between workers. The default is for a single worker.

    `Replication`, `EqualBitsReplication`, `FullyShardedModel`, and `HorovodGradients` override
    methods.
    """

    def average(self, optimizer: torch.optim.Optimizer) -> None:
        """Average gradients of an optimizer that the workers have not averaged."""

    def keep(self, optimizer: torch.optim.Optimizer) -> bool:
        """Take the gradients of a micro-batch. If False, the caller accumulates them."""
        return False

    def rows(self, parameters: Any) -> Any:
        """Return the tensors that have this worker's gradients of some parameters."""
        return parameters

    def whole_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """Return the norm of all workers' gradients, given the norm of this worker's gradients."""
        return norm
