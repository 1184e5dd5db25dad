"""Exact metrics over batches and over workers: means, and whatever else can be merged.

On its way a metric is a number or tensor of `train_batch`, an `AverageMeter` (total, weight, last
value) in the worker, a mean with its weight in the `Summary` of a segment and of the call, and a
number in the dict that `merge_workers` makes of the workers' summaries. So a mean over uneven
batches and shards equals the one that a single process would have computed over the same data. What
is no mean, such as a perplexity, stays a :class:`MergeableMetric` until the workers' are merged.
Sums are float64. The idea of mergeable metrics with the division at the end is that of
``clu.metrics`` and TorchMetrics.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raysgd.mergeable import (
    Computed,
    MergeableMetric,
    Sums,
    computed,
    is_at_hand,
    merged_metrics,
    plain,
    ratio,
    summable,
)

__all__ = [
    "BATCH_COUNT",
    "NUM_SAMPLES",
    "NUM_SKIPPED_STEPS",
    "AverageMeter",
    "AverageMeterCollection",
    "Computed",
    "MergeableMetric",
    "Summary",
    "Sums",
    "computed",
    "is_number",
    "merge_segments",
    "merge_workers",
    "ratio",
]

NUM_SAMPLES = "num_samples"
"""Key under which a batch says how many samples it held: the weight of its metrics."""
BATCH_COUNT = "batch_count"
"""Key of the number of batches in a result."""
NUM_SKIPPED_STEPS = "num_skipped_steps"
"""Key of the number of updates that were skipped in a call, since float16 gradients overflowed."""


def is_number(value: Any) -> bool:
    """Whether `value` can be averaged: a number, or a tensor or array of numbers."""
    if hasattr(value, "__array__"):
        # numpy has arrays of texts as well; torch's dtypes have no kind and are all of numbers
        return getattr(value.dtype, "kind", "f") in "biufc"
    return isinstance(value, numbers.Number)


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
        """Forget everything."""
        self._last: Any = 0.0
        self._total: Any = 0.0
        self.count: float = 0

    def update(self, val: Any, n: float = 1) -> None:
        """Add `val`, the mean of `n` samples: a number, or a tensor, read once at the end."""
        self._last = summable(val)
        if n:  # the mean of no samples may be NaN, and counts for nothing
            self._total = self._total + self._last * n
            self.count += n

    @property
    def held(self) -> Any:
        """The newest value as it was given, on its device."""
        return self._last

    @property
    def val(self) -> Any:
        """The newest value."""
        return plain(self._last)

    @property
    def sum(self) -> Any:
        """The weighted sum."""
        return plain(self._total)

    @property
    def avg(self) -> Any:
        """The weighted mean; NaN without samples."""
        return self.sum / self.count if self.count else float("nan")


class Summary(dict[str, Any]):
    """A result dict that remembers the weight of each mean in it, so that it can be merged."""

    def __init__(self, values: Mapping[str, Any], weights: Mapping[str, float]) -> None:
        super().__init__(values)
        self.weights = dict(weights)

    def __reduce__(self) -> tuple[Any, ...]:
        return Summary, (dict(self), self.weights)


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
        """Forget everything."""
        self.batch_count = 0
        self.num_samples: float = 0
        self._meters: dict[str, AverageMeter] = {}
        self._mergeable: dict[str, tuple[MergeableMetric, MergeableMetric]] = {}
        self._others: dict[str, Any] = {}

    def update(self, metrics: Mapping[str, Any], n: float = 1) -> None:
        """Add the metrics of one batch of `n` samples.

        Numbers are averaged, mergeable metrics merged; of other values the newest counts.
        """
        self.batch_count += 1
        n = plain(n)
        self.num_samples += n
        for name, value in metrics.items():
            if name == NUM_SAMPLES:
                continue
            if is_number(value):
                if name not in self._meters:
                    self._meters[name] = AverageMeter()
                self._meters[name].update(value, n)
            elif isinstance(value, MergeableMetric):
                held = self._mergeable.get(name)
                self._mergeable[name] = (held[0].merge(value) if held else value), value
            else:
                self._others[name] = value

    def is_at_hand(self, name: str) -> bool:
        """Whether the newest value of a metric can be read without waiting for a GPU."""
        if name in self._mergeable:
            return is_at_hand(self._mergeable[name][1])
        held = self._meters[name].held if name in self._meters else None
        return getattr(getattr(held, "device", None), "type", "cpu") == "cpu"

    def last(self, name: str) -> Any:
        """Return the newest value of a metric, or None."""
        if name in self._mergeable:
            return computed(name, self._mergeable[name][1]).get(name)
        meter = self._meters.get(name)
        return None if meter is None else meter.val

    def summary(self) -> Summary:
        """Return ``num_samples``, ``batch_count`` and, for each key, its mean and last value.

        In place of its mean a mergeable metric has its value, as :class:`Computed`.
        """
        values: dict[str, Any] = {NUM_SAMPLES: self.num_samples, BATCH_COUNT: self.batch_count}
        weights: dict[str, float] = {}
        for name, meter in self._meters.items():
            values[name] = meter.avg
            values[f"last_{name}"] = meter.val
            weights[name] = meter.count
        for name, (merged, last) in self._mergeable.items():
            values.update(computed(name, merged))
            values.update({k: float(v) for k, v in computed(f"last_{name}", last).items()})
        for name, value in self._others.items():
            values[name] = values[f"last_{name}"] = value
        return Summary(values, weights)


def _weight(part: Mapping[str, Any], name: str) -> float:
    """Return what a part's mean counts for: its own weight, else its samples, else 1."""
    if isinstance(part, Summary) and name in part.weights:
        return part.weights[name]
    samples = part.get(NUM_SAMPLES, 1)
    return float(samples) if isinstance(samples, numbers.Real) else 1.0


def _mean(values: Sequence[Any], weights: Sequence[float]) -> tuple[Any, float]:
    """Return the weighted mean and the total weight. A part of weight 0 counts for nothing."""
    weight = sum(weights)
    if not weight:
        return (plain(values[0]) if len(values) == 1 else float("nan")), 0.0
    terms = [plain(v) * w for v, w in zip(values, weights, strict=True) if w]
    return sum(terms[1:], start=terms[0]) / weight, weight


def _keys(parts: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for part in parts for name in part))


def merge_segments(parts: Sequence[Mapping[str, Any]]) -> Summary:
    """Merge what one worker returned for consecutive segments of one call.

    Samples and batches are summed, means weighted, mergeable metrics merged, and of ``last_k``
    and of values that are not numbers the newest one counts.
    """
    if len(parts) == 1 and isinstance(parts[0], Summary):
        return parts[0]
    merged: dict[str, Any] = {}
    weights: dict[str, float] = {}
    for name in _keys(parts):
        held = [part for part in parts if name in part]
        values = [part[name] for part in held]
        if not all(is_number(value) for value in values) or name.startswith("last_"):
            merged[name] = values[-1]
        elif name in (NUM_SAMPLES, BATCH_COUNT):
            merged[name] = sum(values)
        elif not all(isinstance(value, Computed) for value in values):
            merged[name], weights[name] = _mean(values, [_weight(p, name) for p in held])
    for name, metric in merged_metrics(parts).items():
        for key, value in computed(name, metric).items():
            merged.setdefault(key, value)
    return Summary(merged, weights)


def merge_workers(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the results of all workers, in the order of their ranks, into one.

    ``num_samples`` is summed; ``batch_count`` and ``last_k`` are plain means; of
    ``num_skipped_steps``, which workers skip together, the largest counts; mergeable metrics are
    merged and computed; other numbers are means weighted by each worker's samples; of values that
    are not numbers the one of the lowest rank counts. Keys are the union over the workers.

    >>> merge_workers([{"num_samples": 3, "loss": 1.0}, {"num_samples": 1, "loss": 5.0}])
    {'num_samples': 4, 'loss': 2.0}
    """
    merged: dict[str, Any] = {}
    for name in _keys(parts):
        held = [part for part in parts if name in part]
        values = [part[name] for part in held]
        if not all(is_number(value) for value in values):
            merged[name] = next(value for value in values if not is_number(value))
        elif name == NUM_SAMPLES:
            merged[name] = sum(plain(value) for value in values)
        elif name == NUM_SKIPPED_STEPS:
            merged[name] = max(plain(value) for value in values)
        elif name == BATCH_COUNT and len(set(values)) == 1:
            merged[name] = plain(values[0])
        elif name == BATCH_COUNT or name.startswith("last_"):
            merged[name], _ = _mean(values, [1.0] * len(values))
        elif not all(isinstance(value, Computed) for value in values):
            merged[name], _ = _mean(values, [_weight(part, name) for part in held])
    for name, metric in merged_metrics(parts).items():
        value = metric.compute()
        for end, number in (value if isinstance(value, Mapping) else {"": value}).items():
            merged.setdefault(f"{name}{end}", float(number))
    return merged
