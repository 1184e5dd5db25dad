"""Regression."""

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch.nn import functional

from raysgd.metrics import Sums, ratio
from raysgd.operators.base import SupervisedOperator

_LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "mse": functional.mse_loss,
    "l1": functional.l1_loss,
    "huber": functional.huber_loss,
}


class Regressor(SupervisedOperator):
    """Predicts one or more numbers for each sample.

    The loss is the mean over all predicted numbers. For a prediction p and a target y it is:

    - "mse": ``(p - y)²``
    - "l1": ``|p - y|``
    - "huber": ``(p - y)² / 2`` if ``|p - y| ≤ δ``, otherwise ``δ (|p - y| - δ / 2)`` (Huber 1964,
      "Robust Estimation of a Location Parameter")

    ==============================  ==========  ================================================
    key                             default     meaning
    ==============================  ==========  ================================================
    ``loss``                        "mse"       "mse", "l1" or "huber"
    ``huber_delta``                 1.0         δ above, in the unit of the target
    ==============================  ==========  ================================================

    It also has the keys of :class:`SupervisedOperator`. Batches are ``(*features, target)``. Output
    and target have the same shape, or (batch, 1) and (batch).

    Metrics: ``val_loss``; ``val_mae``, the mean absolute error, and ``val_rmse``, the root mean
    squared error, in the unit of the target; ``val_r2``, the coefficient of determination, computed
    from float64 sums over all batches and workers.
    """

    OPTIONS: ClassVar[Mapping[str, Any]] = {
        **SupervisedOperator.OPTIONS,
        "loss": "mse",
        "huber_delta": 1.0,
    }

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        loss = self.options["loss"]
        if loss not in _LOSSES:
            raise ValueError(
                f"{type(self).__name__}: config['loss']={loss!r} must be one of "
                f"{', '.join(map(repr, _LOSSES))}."
            )

    def run_model(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and target, with the same shape."""
        output, target = super().run_model(batch)
        if target is None:
            return output, target
        if output.shape == (*target.shape, 1):
            output = output.squeeze(-1)
        if output.shape != target.shape:
            # Broadcasting would compare every output with every target.
            raise ValueError(
                f"{type(self).__name__}: the model's output has the shape {tuple(output.shape)}, "
                f"but the target {tuple(target.shape)}. They must be equal."
            )
        if not target.is_floating_point():
            # Use at least float32, because outputs can have 16 bits in mixed precision.
            target = target.to(torch.promote_types(output.dtype, torch.float32))
        return output, target

    def compute_losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        kind = self.options["loss"]
        output = output.to(torch.promote_types(output.dtype, target.dtype))
        arguments = {"delta": self.options["huber_delta"]} if kind == "huber" else {}
        return _LOSSES[kind](output, target, reduction="none", **arguments)

    def compute_metrics(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
        output, target = (each.double().reshape(len(target), -1) for each in (output, target))
        error = output - target
        return {
            "mae": Sums(ratio, total=error.abs().sum(), weight=error.numel()),
            "rmse": Sums(_root, total=error.square().sum(), weight=error.numel()),
            "r2": Sums(
                r2,
                count=len(target),
                targets=target.sum(dim=0),
                squares=target.square().sum(dim=0),
                errors=error.square().sum(dim=0),
            ),
        }


def _root(total: float, weight: float) -> float:
    return math.sqrt(ratio(total, weight))


def r2(count: float, targets: Any, squares: Any, errors: Any) -> float:
    """Return the coefficient of determination, ``1 - Σ (y - p)² / Σ (y - mean of y)²``.

    The arguments are the number of samples, and for each output the sums of the targets, their
    squares, and the squared errors. The result is the mean over the outputs, or NaN if the targets
    of an output do not vary.
    """
    deviations = torch.as_tensor(squares - targets**2 / count)
    if not bool((deviations > 1e-13 * squares).all()):  # otherwise it is a rounding error
        return float("nan")
    return float((1 - torch.as_tensor(errors) / deviations).mean())
