"""Metrics that a LightningModule logs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from raysgd.metrics import MergeableMetric, computed


class Reduced(MergeableMetric):
    """A number that was logged with ``reduce_fx`` "sum", "min", or "max"."""

    def __init__(self, reduce_fx: str, value: Any) -> None:
        self._reduce_fx = reduce_fx
        # A GPU tensor stays on the GPU, because reading it would synchronize.
        self._value = value.detach().double() if isinstance(value, torch.Tensor) else value

    def merge(self, other: Reduced) -> Reduced:
        merged = REDUCTIONS[self._reduce_fx](self._value, other._value)
        return Reduced(self._reduce_fx, merged)

    def compute(self) -> float:
        return float(self._value)

    def __getstate__(self) -> dict[str, Any]:
        return {"_reduce_fx": self._reduce_fx, "_value": float(self._value)}


class TorchMetric(MergeableMetric):
    """A metric of torchmetrics, with the data since it was last logged."""

    def __init__(self, metric: Any) -> None:
        for each in metric.modules():  # a wrapper contains other metrics
            each.distributed_available_fn = bool  # False, as workers may compute unequally often
        self._metric = metric

    def merge(self, other: TorchMetric) -> TorchMetric:
        merged = other._metric.clone()
        # The public merge_state refuses many metrics, such as MaxMetric.
        merged._reduce_states(self._metric.metric_state)
        merged._computed = None  # a cached value
        return TorchMetric(merged)

    def compute(self) -> Any:
        return self._metric.compute()

    def __getstate__(self) -> dict[str, Any]:
        return {"_metric": self._metric.clone().cpu()}


REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {"sum": operator.add, "min": min, "max": max}


def computed_values(logged: Mapping[str, Any]) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    for name, value in logged.items():
        if isinstance(value, MergeableMetric):
            metrics.update(computed(name, value))
        else:
            metrics[name] = value.item() if isinstance(value, torch.Tensor) else value
    return metrics
