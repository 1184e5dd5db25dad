"""Regression."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch.nn import functional

from raysgd.metrics import MergeableMetric, Sums, ratio
from raysgd.operators.options import Option, choice, number
from raysgd.operators.supervised import SupervisedOperator


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
    squared error, in the unit of the target; ``val_r2``, the coefficient of determination (see
    :class:`R2`), computed from sums over all batches and workers.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        **SupervisedOperator.OPTIONS,
        "loss": choice("mse", "mse", "l1", "huber"),
        "huber_delta": number(1.0, 0.0, above=True),
    }

    def predict(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and target, with the same shape."""
        output, target = super().predict(batch)
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

    def losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        kind = self.options["loss"]
        output = output.to(torch.promote_types(output.dtype, target.dtype))
        if kind == "huber":
            delta = self.options["huber_delta"]
            return functional.huber_loss(output, target, delta=delta, reduction="none")
        loss = functional.mse_loss if kind == "mse" else functional.l1_loss
        return loss(output, target, reduction="none")

    def metrics(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
        output, target = output.double(), target.double()
        error = output - target
        return {
            "mae": Sums(ratio, total=error.abs().sum(), weight=error.numel()),
            "rmse": Sums(_root, total=error.square().sum(), weight=error.numel()),
            "r2": R2.of(output, target),
        }


def _root(total: float, weight: float) -> float:
    return math.sqrt(ratio(total, weight))


class R2(MergeableMetric):
    """Coefficient of determination, ``1 - Σ (y - p)² / Σ (y - mean of y)²``.

    1 for perfect predictions, 0 for predictions as good as the mean. For several outputs it is the
    mean over outputs. NaN if the targets do not vary.

    It holds the number of samples, and for each output the mean of the targets, the sum of their
    squared deviations from this mean, and the sum of squared errors. `merge` uses the formula of
    Chan, Golub, and LeVeque 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances". It stays exact for large targets that vary little.
    """

    def __init__(
        self, count: int, mean: torch.Tensor, deviations: torch.Tensor, errors: torch.Tensor
    ) -> None:
        self.count = count
        self.mean = mean
        self.deviations = deviations
        self.errors = errors

    @classmethod
    def of(cls, output: torch.Tensor, target: torch.Tensor) -> Self:
        """Return the metric of a batch. Both arguments have the same shape (batch, ...)."""
        output, target = (t.detach().double().reshape(len(t), -1) for t in (output, target))
        mean = target.mean(dim=0)
        deviations = (target - mean).square().sum(dim=0)
        return cls(len(target), mean, deviations, (target - output).square().sum(dim=0))

    def merge(self, other: Self) -> Self:
        count = self.count + other.count
        distance = other.mean - self.mean
        share = other.count / count
        return type(self)(
            count,
            self.mean + share * distance,
            self.deviations + other.deviations + distance.square() * self.count * share,
            self.errors + other.errors,
        )

    def compute(self) -> float:
        if not bool((self.deviations > 0).all()):
            return float("nan")
        return float((1 - self.errors / self.deviations).mean())

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value.cpu() if isinstance(value, torch.Tensor) else value
            for name, value in vars(self).items()
        }
