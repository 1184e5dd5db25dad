"""Exact metrics over batches and workers: means, and other values that can be merged.

A worker adds the metrics of its batches to meters. Each number in the result is a
:class:`MetricValue`, which remembers its :class:`MergeableMetric`: for a mean, the weighted sum and
the weight. `merge_worker_metrics` merges the metrics of all workers, and computes one dict of
numbers. The idea to merge first and divide last comes from ``clu.metrics`` and TorchMetrics.
"""

from __future__ import annotations

import math
import numbers
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from statistics import mean
from typing import Any, Self

import numpy as np

from raysgd._internal.nested import map_leaves, try_copy

__all__ = [
    "BATCH_COUNT",
    "NUM_SAMPLES",
    "AverageMeter",
    "AverageMeterCollection",
    "MergeableMetric",
    "Sums",
    "ratio",
]

NUM_SAMPLES = "num_samples"
"""Key of a batch's number of samples, which is the weight of its metrics."""
BATCH_COUNT = "batch_count"
"""Key of the number of batches in a result."""
_ONE = 2**1074
"""The number 1 in units of the smallest float. Sums are exact whole numbers of these units."""


def is_numeric(value: Any) -> bool:
    """Return whether `value` can be averaged: a real number, or a tensor or array of these."""
    if hasattr(value, "__array__"):
        # NumPy and TensorFlow have text. PyTorch dtypes have no `kind`.
        if getattr(value.dtype, "name", "") == "string" or getattr(value.dtype, "is_complex", 0):
            return False
        return getattr(value.dtype, "kind", "f") in "biuf"
    return isinstance(value, float | int | numbers.Real)


def to_cpu_value(value: Any) -> Any:
    """Return the value of a tensor or an array on the CPU. Return other values unchanged."""
    if hasattr(value, "detach"):
        return value.item() if value.numel() == 1 else value.detach().cpu().double()
    if hasattr(value, "__array__"):
        value = value.numpy() if hasattr(value, "numpy") else value  # of TensorFlow
        return value.item() if value.size == 1 else value.astype("float64")
    return value


def _summable(value: Any) -> Any:
    """Convert `value` for float64 sums. Tensors on an accelerator stay there, to avoid waiting."""
    if hasattr(value, "detach") and value.device.type not in ("cpu", "mps"):
        return value.detach().double()
    value = to_cpu_value(value)
    return float(value) if isinstance(value, float | numbers.Real) else value


def _exact(value: Any) -> Any:
    """Return a float in units of `_ONE`, so that the order of the terms does not change a sum."""
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    numerator, denominator = value.as_integer_ratio()
    return numerator * (_ONE // denominator)


def _round(total: Any) -> Any:
    """Return an exact sum as the nearest float. Return other sums as they are."""
    if not isinstance(total, int):
        return total
    try:
        return total / _ONE
    except OverflowError:
        return math.inf if total > 0 else -math.inf


def _add_exactly(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        return left + right
    return _round(left) + _round(right)


class AverageMeter:
    """Running weighted mean of one metric.

    >>> meter = AverageMeter()
    >>> meter.update(1.0, n=3)
    >>> meter.update(5.0, n=1)
    >>> meter.avg
    2.0
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Discard all values."""
        self._last: Any = 0.0
        self._total: Any = 0
        self.count: float = 0

    def update(self, val: Any, n: float = 1) -> None:
        """Add `val`, the mean of `n` samples. Without samples, keep the newest value.

        Tensors on an accelerator are read later.
        """
        if n or not self.count:
            self._last = _summable(val)
        if n:  # the mean of no samples can be NaN
            self._total = _add_exactly(_exact(self._last * n), self._total)
            self.count += n

    @property
    def val(self) -> Any:
        """Newest value."""
        return to_cpu_value(self._last)

    @property
    def sum(self) -> Any:
        """Weighted sum."""
        return to_cpu_value(_round(self._total))

    @property
    def avg(self) -> Any:
        """Weighted mean. NaN without samples."""
        return self.sum / self.count if self.count else float("nan")

    def _as_sums(self) -> Sums:
        sums = Sums(ratio, total=0, weight=self.count)
        sums._sums["total"] = self._total
        return sums


class MergeableMetric(ABC):
    """A metric that is not a mean of numbers. A batch returns such a metric instead of a number.

    raysgd merges the metrics of all batches and all workers before it computes the value. The
    result is the same as in one process with all data. The metric must be picklable.
    """

    @abstractmethod
    def merge(self, other: Self) -> Self:
        """Return a metric over the data of both metrics."""

    @abstractmethod
    def compute(self) -> Any:
        """Return a number, an array, or a dict from name suffixes to numbers or arrays.

        If a metric named ``val_f1`` computes ``{"_cat": 0.9, "_dog": 0.8}``, the result contains
        ``val_f1_cat`` and ``val_f1_dog``. The suffixes of an array are its indices, as in
        ``val_f1_0``, or ``val_matrix_0_1``.
        """


class Sums(MergeableMetric):
    """Sums over samples, and a function that computes the metric from them.

    >>> from math import sqrt
    >>> def rmse(squares, count):
    ...     return sqrt(squares / count)
    >>> Sums(rmse, squares=7.0, count=3).merge(Sums(rmse, squares=9.0, count=1)).compute()
    2.0

    Args:
        function: Called with the sums as keyword arguments. Returns the same types as
            `MergeableMetric.compute`. Must be picklable, so define it at the top of a module.
        sums: Numbers, or tensors or arrays of numbers. Tensors on an accelerator stay there.
    """

    def __init__(self, function: Callable[..., Any], /, **sums: Any) -> None:
        self.function = function
        self._sums = {name: _exact(try_copy(_summable(value))) for name, value in sums.items()}

    @property
    def sums(self) -> dict[str, Any]:
        """Sums by name: floats, or float64 on the CPU for arrays and tensors."""
        return {name: to_cpu_value(_round(value)) for name, value in self._sums.items()}

    def merge(self, other: Self) -> Self:
        """Return a metric with the added sums of both metrics."""
        added = {name: _add_exactly(value, other._sums[name]) for name, value in self._sums.items()}
        merged = object.__new__(type(self))
        vars(merged).update(vars(self), _sums=added)
        return merged

    def compute(self) -> Any:
        """Call the function with the sums, and return the result."""
        return self.function(**self.sums)

    def __getstate__(self) -> dict[str, Any]:
        return {"function": self.function, "_sums": map_leaves(self._sums, to_cpu_value)}


def ratio(total: Any, weight: Any) -> Any:
    """Return ``total / weight``, or NaN if the weight is zero. A function for `Sums`.

    Use it for a mean that is not weighted by samples::

        return {"val_loss": Sums(ratio, total=nats, weight=num_tokens), "num_samples": len(batch)}
    """
    return total / weight if weight else float("nan")


class MetricValue(float):
    """A number that remembers its metric, so that it can be merged.

    `suffix` is the end of the number's name, if the metric computes several numbers.
    """

    metric: MergeableMetric
    suffix: str


def _numbers(value: Any) -> dict[str, float]:
    """Return what a metric computed as numbers by name suffix."""
    if isinstance(value, Mapping):
        inner = {suffix: _numbers(each) for suffix, each in value.items()}
        return {f"{start}{i}": n for start, numbers in inner.items() for i, n in numbers.items()}
    array = np.asarray(to_cpu_value(value), dtype=np.float64)
    return {"".join(f"_{i}" for i in index): float(n) for index, n in np.ndenumerate(array)}


def values_of(name: str, metric: MergeableMetric, raises: bool = False) -> dict[str, MetricValue]:
    """Return the values of a metric, by name.

    A metric can fail on this worker's part of the data alone. Its value is then NaN, unless
    `raises` is true.
    """
    try:
        value = metric.compute()
    except Exception as error:
        if raises:
            error.add_note(f"The metric {name!r}, a {type(metric).__name__}, raised this error.")
            raise
        value = float("nan")
    values = {}
    for suffix, number in _numbers(value).items():
        values[f"{name}{suffix}"] = each = MetricValue(number)
        each.metric, each.suffix = metric, suffix
    return values


class AverageMeterCollection:
    """Running means of all metrics that batches return.

    >>> meters = AverageMeterCollection()
    >>> meters.update({"loss": 1.0}, n=3)
    >>> meters.update({"loss": 5.0}, n=1)
    >>> meters.summary()
    {'num_samples': 4, 'batch_count': 2, 'loss': 2.0, 'last_loss': 5.0}
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Discard all metrics."""
        self.batch_count = 0
        self.num_samples: float = 0
        self._meters: dict[str, AverageMeter] = {}
        self._mergeable: dict[str, tuple[MergeableMetric, MergeableMetric]] = {}
        self._not_averaged: dict[str, Any] = {}

    @property
    def n(self) -> float:
        """Number of samples, under the name that older scripts use."""
        return self.num_samples

    def update(self, metrics: Mapping[str, Any], n: float = 1, is_batch: bool = True) -> None:
        """Add the metrics of one batch of `n` samples.

        Numbers are averaged. Numbers in nested dicts are averaged too, with names such as
        ``outer/inner``. Mergeable metrics are merged. For texts and other values, the newest is
        kept. None is no value, nor is a ``batch_count``. Pass ``is_batch=True`` only for the last
        of the parts of a batch.

        Raises:
            TypeError: If a metric is a list, tuple, or set, whose meaning is ambiguous.
        """
        self.batch_count += is_batch
        n = to_cpu_value(n)
        self.num_samples += n
        self._add(metrics, n)

    def _add(self, metrics: Mapping[str, Any], n: float, prefix: str = "") -> None:
        for key, value in metrics.items():
            name = f"{prefix}{key}" if prefix else key
            if name in (NUM_SAMPLES, BATCH_COUNT):
                continue
            is_mean = is_numeric(value)
            _check_size(name, value)
            if is_mean and name in self._mergeable:
                value, is_mean = _sums_of(value, n), False
            if is_mean:
                if (meter := self._meters.get(name)) is None:
                    meter = self._meters[name] = AverageMeter()
                before, shape = getattr(meter._last, "shape", ()), getattr(value, "shape", ())
                if n and meter.count and before != shape and math.prod(before) != math.prod(shape):
                    raise ValueError(
                        f"The metric {name!r} has {math.prod(shape)} elements, but had "
                        f"{math.prod(before)} in an earlier batch. Return one number, such as the "
                        "mean, or always as many elements."
                    )
                meter.update(value, n)
            elif isinstance(value, MergeableMetric):
                if name in self._meters:
                    sums = self._meters.pop(name)._as_sums()
                    self._mergeable[name] = sums, sums
                earlier = self._mergeable.get(name)
                merged = _merge_two(name, earlier[0], value) if earlier else value
                self._mergeable[name] = merged, value
            elif isinstance(value, Mapping):
                self._add(value, n, f"{name}/")
            elif isinstance(value, list | tuple | set):
                raise TypeError(
                    f"The metric {name!r} is {value!r:.200}. A {type(value).__name__} cannot be "
                    "averaged. Return a dict with a name for each number, a tensor or an array "
                    "for a mean of each element, or a raysgd.metrics.MergeableMetric."
                )
            else:
                self._not_averaged[name] = value

    def has_nonfinite_loss(self) -> bool:
        """Return whether a metric with ``loss`` in its name has a value that is not finite."""
        totals = [meter._total for name, meter in self._meters.items() if "loss" in name.lower()]
        for name, (merged, _) in self._mergeable.items():
            if "loss" in name.lower() and isinstance(merged, Sums):
                totals += merged._sums.values()
        # Exact totals are finite.
        rest = (to_cpu_value(each) for each in totals if not isinstance(each, int))
        return not all(np.isfinite(each).all() for each in rest)

    def latest(self) -> dict[str, float]:
        """Return the newest values of the first four metrics, without arrays."""
        newest = {name: self._newest(name) for name in [*self._meters, *self._mergeable][:4]}
        return {name: number[""] for name, number in newest.items() if "" in number}

    def _newest(self, name: str) -> dict[str, float]:
        if name in self._meters:
            return _numbers(self._meters[name].val)
        values = values_of(name, self._mergeable[name][1]).values()
        return {value.suffix: float(value) for value in values}

    def summary(self) -> dict[str, Any]:
        """Return ``num_samples``, ``batch_count``, and the mean and last value of each metric.

        For mergeable metrics, return the value instead of a mean. Means and these values are each
        a :class:`MetricValue`. A metric that batches name ``last_k`` replaces the last value of
        ``k``.
        """
        values: dict[str, Any] = {NUM_SAMPLES: self.num_samples, BATCH_COUNT: self.batch_count}
        metrics: dict[str, Any] = {name: meter._as_sums() for name, meter in self._meters.items()}
        metrics |= {name: merged for name, (merged, _) in self._mergeable.items()}
        own: dict[str, Any] = {}  # also replaces the last value of another metric
        for name, metric in metrics.items():
            own |= (computed := values_of(name, metric))
            last = {f"last_{name}{suffix}": n for suffix, n in self._newest(name).items()}
            values |= {**computed, **last}
        for name, value in self._not_averaged.items():
            if value is not None or name not in metrics:
                own[name] = values[name] = values[f"last_{name}"] = value
        return values | own


def _is_mean(name: str, value: Any) -> bool:
    is_own = name in (NUM_SAMPLES, BATCH_COUNT) or name.startswith("last_")  # of raysgd
    return is_numeric(value) and (isinstance(value, MetricValue) or not is_own)


def _check_size(name: str, value: Any) -> None:
    if isinstance(value, int) and value.bit_length() > sys.float_info.max_exp:
        raise ValueError(
            f"The metric {name!r} is an int of {value.bit_length()} bits. It must be below "
            "1.8e308, the largest float64."
        )


def _merge_two(name: str, *pair: MergeableMetric) -> MergeableMetric:
    names = [sorted(each._sums) if isinstance(each, Sums) else [] for each in pair]
    if names[0] != names[1]:
        kinds = [f"{type(m).__name__}({', '.join(names[i])})" for i, m in enumerate(pair)]
        raise TypeError(
            f"The metric {name!r} is {kinds[0]} in some batches, and {kinds[1]} in others. A plain "
            "number is Sums(total, weight). Return the same kind in all batches."
        )
    return pair[0].merge(pair[1])


def _sums_of(value: Any, weight: float) -> Sums:
    # Ignore means over no samples, because they can be NaN, and NaN times 0 is NaN.
    return Sums(ratio, total=to_cpu_value(value) * weight if weight else 0.0, weight=weight)


def with_weight(metrics: Mapping[str, Any], weight: float) -> dict[str, Any]:
    """Return the metrics with the weight `weight`, unless it has ``num_samples``."""
    result = dict(metrics)
    for name, value in metrics.items():
        if not (NUM_SAMPLES in metrics or isinstance(value, MetricValue)) and _is_mean(name, value):
            _check_size(name, value)
            result |= values_of(name, _sums_of(value, weight))
    return result


def _merge(
    results: Sequence[Mapping[str, Any]], combine: Callable[[str, list[Any]], Any], raises: bool
) -> dict[str, Any]:
    """Merge the metrics of all results. `combine` merges counts, ``last_k``, texts, and the like.

    A number without a metric is a mean over the samples of its result. None does not count.
    """
    names = dict.fromkeys(name for result in results for name in result)
    metrics: dict[str, dict[int, MergeableMetric]] = {}
    merged: dict[str, Any] = {}
    for name in names:
        values = {i: v for i, r in enumerate(results) if (v := r.get(name)) is not None}
        if not (values and all(_is_mean(name, value) for value in values.values())):
            merged[name] = combine(name, [*values.values()] or [None])
        elif all(isinstance(value, MetricValue) for value in values.values()):
            # All numbers of a metric hold the same object, even if one computed only NaN.
            for i, value in values.items():
                metrics.setdefault(name.removesuffix(value.suffix), {})[i] = value.metric
        else:
            weights = {i: to_cpu_value(results[i].get(NUM_SAMPLES, 1)) for i in values}
            metrics[name] = {i: _sums_of(value, weights[i]) for i, value in values.items()}
    for name, by_result in metrics.items():
        total = reduce(partial(_merge_two, name), by_result.values())
        merged = {**values_of(name, total, raises), **merged}
    return {name: merged[name] for name in names if name in merged} | merged


def merge_segment_metrics(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the results of one worker for consecutive segments of one call.

    Samples and batches are summed, means are weighted, and mergeable metrics are merged. For
    ``last_k`` and for values that are not numbers, the newest is kept.
    """

    def combine(name: str, values: list[Any]) -> Any:
        return sum(values) if name in (NUM_SAMPLES, BATCH_COUNT) else values[-1]

    return _merge(results, combine, raises=False)


def with_epoch(epoch: int, metrics: dict[str, Any]) -> dict[str, Any]:
    """Return metrics with ``epoch`` first, and over the operator's own key of this name."""
    return {"epoch": epoch} | metrics | {"epoch": epoch}


def as_test_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a validation with the prefix ``test`` instead of ``val``."""
    return {
        name if name in (NUM_SAMPLES, BATCH_COUNT) else f"test_{name.removeprefix('val_')}": value
        for name, value in metrics.items()
        if not name.startswith("last_")
    }


def merge_worker_metrics(
    results: Sequence[Mapping[str, Any]], raises: bool = True
) -> dict[str, Any]:
    """Merge the results of all workers, in the order of their ranks.

    ``num_samples`` is summed. ``batch_count`` and ``last_k`` are averaged without weights.
    Mergeable metrics are merged and computed; if that fails, they are NaN unless it `raises`. Other
    numbers are averaged, weighted by each worker's samples. For texts and other values, the value
    of the lowest rank is kept. The keys are the union over the workers.

    >>> merge_worker_metrics([{"num_samples": 3, "loss": 1.0}, {"num_samples": 1, "loss": 5.0}])
    {'num_samples': 4, 'loss': 2.0}
    """

    def combine(name: str, values: list[Any]) -> Any:
        if texts := [value for value in values if not is_numeric(value)]:
            return texts[0]
        return (sum if name == NUM_SAMPLES else mean)([to_cpu_value(value) for value in values])

    merged = _merge(results, combine, raises)
    return {name: float(n) if isinstance(n, MetricValue) else n for name, n in merged.items()}
