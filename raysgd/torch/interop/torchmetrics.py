"""Metrics of TorchMetrics, and those that a LightningModule logs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from raysgd.metrics import MergeableMetric, to_cpu_value, values_of

if TYPE_CHECKING:
    from torchmetrics import Metric


class ReducedMetric(MergeableMetric):
    """A number that was logged with ``reduce_fx`` "sum", "min", or "max"."""

    def __init__(self, reduce_fx: str, value: Any) -> None:
        self._reduce_fx = reduce_fx
        # A GPU tensor stays on the GPU, because reading it would synchronize.
        self._value = value.detach().double() if isinstance(value, torch.Tensor) else value

    def merge(self, other: ReducedMetric) -> ReducedMetric:
        return type(self)(self._reduce_fx, REDUCTIONS[self._reduce_fx](self._value, other._value))

    def compute(self) -> float:
        return float(self._value)

    def __getstate__(self) -> dict[str, Any]:
        return {"_reduce_fx": self._reduce_fx, "_value": float(self._value)}


class MergeableTorchMetric(MergeableMetric):
    """A metric of TorchMetrics, of several batches or workers.

    `compute` reduces their states together, as TorchMetrics reduces the states of its processes.
    """

    def __init__(self, *metrics: Metric) -> None:
        self._metrics = metrics

    def merge(self, other: MergeableTorchMetric) -> MergeableTorchMetric:
        both = MergeableTorchMetric(*self._metrics, *other._metrics)
        # Other reductions, such as means, need all states together.
        return type(self)(both._reduce_states()) if _are_associative(self._metrics[0]) else both

    def compute(self) -> Any:
        return _add_underscores(self._reduce_states().compute())

    def _reduce_states(self) -> Metric:
        # Copy, because some metrics change their states in compute(). The newest is the smallest.
        metric = self._metrics[-1].clone()
        self.load_into(metric)
        return metric

    def load_into(self, metric: Metric) -> None:
        # TorchMetrics has no public names for the rest. Its `reset` would reset the states, too.
        for member, *own in zip(*map(nested_metrics, (metric, *self._metrics)), strict=True):
            for name, reduce in member._reductions.items():
                setattr(member, name, _combine([getattr(m, name) for m in own], reduce))
            member._update_count, member._computed = 1, None

    def __getstate__(self) -> dict[str, Any]:
        return {"_metrics": [each.clone().cpu() for each in self._metrics]}


def nested_metrics(metric: Metric) -> list[Metric]:
    """Return a metric and the metrics that it wraps."""
    from torchmetrics import Metric

    return [module for module in metric.modules() if isinstance(module, Metric)]


def copy_without_sync(metric: Metric) -> Metric:
    """Return a copy of a metric that never communicates, as workers may compute unequally often."""
    own = metric._apply(torch.detach).clone()  # tensors with a graph have no copies
    for member in nested_metrics(own):
        member.distributed_available_fn = bool  # without an argument, it returns False
        member.dist_sync_on_step = False
    return own


def _are_associative(metric: Metric) -> bool:
    from torchmetrics.utilities.data import dim_zero_max, dim_zero_min, dim_zero_sum

    return all(
        reduce in (dim_zero_max, dim_zero_min, dim_zero_sum)
        or isinstance(member.metric_state[name], list)
        for member in nested_metrics(metric)
        for name, reduce in member._reductions.items()
    )


def _combine(states: list[Any], reduce: Any) -> Any:
    if isinstance(states[0], list):
        # Lists of batches are concatenated.
        return [batch for state in states for batch in state]
    if len(states) == 1:
        return states[0].clone()
    stacked = torch.stack(states)
    return stacked if reduce is None else reduce(stacked)


def _add_underscores(value: Any) -> Any:
    """Return the result of a metric, with an underscore before each name."""
    if isinstance(value, Mapping):
        return {f"_{key}": _add_underscores(entry) for key, entry in value.items()}
    return value


REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {"sum": operator.add, "min": min, "max": max}


def compute_logged(logged: Mapping[str, Any]) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    for name, value in logged.items():
        is_merged = isinstance(value, MergeableMetric)
        metrics |= values_of(name, value) if is_merged else {name: to_cpu_value(value)}
    return metrics
