"""Metrics that are merged before anything is computed from them."""

from __future__ import annotations

import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any, Self

__all__ = [
    "Computed",
    "MergeableMetric",
    "Sums",
    "computed",
    "is_at_hand",
    "merged_metrics",
    "plain",
    "ratio",
    "summable",
]


def plain(value: Any) -> Any:
    """Return a one-element tensor or array as a Python number, larger ones in float64."""
    if hasattr(value, "detach"):
        value = value.detach()
        return value.item() if value.numel() == 1 else value.cpu().double()
    if hasattr(value, "__array__"):
        return value.item() if value.size == 1 else value.astype("float64")
    return value


def summable(value: Any) -> Any:
    """Return `value` so that sums of it are float64 and cause no wait for a device.

    A tensor on the CPU is read at once, which costs nothing; one on an accelerator stays
    there, since reading it would stop the device at each step.
    """
    device = getattr(value, "device", None)
    if hasattr(value, "detach") and getattr(device, "type", "cpu") not in ("cpu", "mps"):
        return value.detach().double()
    value = plain(value)
    return float(value) if isinstance(value, numbers.Real) else value


class MergeableMetric(ABC):
    """A metric that is more than a mean of numbers: a batch returns one in place of a number.

    Those of all batches, and then of all workers, are merged before anything is computed, so
    that the result is that of one process over all of the data. It has to pickle.
    """

    @abstractmethod
    def merge(self, other: Self) -> Self:
        """Return the metric over the data of both, and leave both as they are."""

    @abstractmethod
    def compute(self) -> float | Mapping[str, float]:
        """Return the value: a number, or several by the end of their names.

        A metric returned as ``val_f1`` that computes ``{"_cat": 0.9, "_dog": 0.8}`` is in the
        result as ``val_f1_cat`` and ``val_f1_dog``.
        """


def is_at_hand(held: Any) -> bool:
    """Whether all that a metric holds can be read without waiting for a GPU, as far as is known."""
    if isinstance(held, MergeableMetric):
        # with __slots__ it has no attributes there, and it is unknown what it holds
        return bool(vars(held)) and is_at_hand(vars(held))
    if isinstance(held, Mapping):
        return all(is_at_hand(value) for value in held.values())
    if isinstance(held, list | tuple | set | frozenset):
        return all(is_at_hand(value) for value in held)
    if (device := getattr(held, "device", None)) is not None:
        return bool(getattr(device, "type", device) == "cpu")  # numpy's has no type
    return hasattr(held, "__array__") or isinstance(
        held, numbers.Number | str | bytes | type | FunctionType | BuiltinFunctionType | None
    )


class Sums(MergeableMetric):
    """Sums over samples, and the function that makes a number of them in the end.

    >>> from math import sqrt
    >>> def rmse(squares, count):
    ...     return sqrt(squares / count)
    >>> Sums(rmse, squares=7.0, count=3).merge(Sums(rmse, squares=9.0, count=1)).compute()
    2.0

    Args:
        function: called with the sums by name; it has to pickle, as functions of a module do.
        sums: numbers, or tensors or arrays of numbers. Tensors on an accelerator stay there.
    """

    def __init__(self, function: Callable[..., Any], /, **sums: Any) -> None:
        self.function = function
        self._sums = {name: summable(value) for name, value in sums.items()}

    @property
    def sums(self) -> dict[str, Any]:
        """The sums by name: float for one number, float64 on the CPU for several."""
        return {name: plain(value) for name, value in self._sums.items()}

    def merge(self, other: Self) -> Self:
        """Add the sums."""
        added = {name: value + other._sums[name] for name, value in self._sums.items()}
        return type(self)(self.function, **added)

    def compute(self) -> float:
        """Call the function."""
        return float(self.function(**self.sums))

    def __getstate__(self) -> dict[str, Any]:
        return {"function": self.function, "_sums": self.sums}

    def __repr__(self) -> str:
        return f"Sums({getattr(self.function, '__name__', self.function)}, {self.sums})"


def ratio(total: Any, weight: Any) -> Any:
    """Return ``total / weight``, a mean; NaN without weight. A function for `Sums`.

    It weights a mean by something else than samples::

        return {"val_loss": Sums(ratio, total=nats, weight=num_tokens), "num_samples": len(batch)}
    """
    return total / weight if weight else float("nan")


class Computed(float):
    """A number that remembers the metric that it was computed from, so that it can be merged.

    What is computed with it is a plain number.

    Args:
        value: the number.
        metric: what it was computed from.
        end: the end of its name, if the metric computes several.
    """

    metric: MergeableMetric
    end: str

    def __new__(cls, value: float, metric: MergeableMetric, end: str = "") -> Self:
        """Make the number."""
        number = super().__new__(cls, value)
        number.metric, number.end = metric, end
        return number

    def __reduce__(self) -> tuple[Any, ...]:
        return Computed, (float(self), self.metric, self.end)


def computed(name: str, metric: MergeableMetric) -> dict[str, Computed]:
    """Return what a worker gives as a metric: its values over this worker's part of the data.

    Where that part alone is too little to compute something the value is NaN; errors are left to
    the merged metric.
    """
    try:
        value = metric.compute()
    except Exception:
        value = float("nan")
    if isinstance(value, Mapping):
        return {f"{name}{end}": Computed(v, metric, end) for end, v in value.items()}
    return {name: Computed(value, metric)}


def merged_metrics(parts: Iterable[Mapping[str, Any]]) -> dict[str, MergeableMetric]:
    """Merge the metrics in some results, by name."""
    merged: dict[str, MergeableMetric] = {}
    for part in parts:
        # all numbers of a metric lead to the same one, also where a part has only NaN for it
        own = {
            name.removesuffix(value.end): value.metric
            for name, value in part.items()
            if isinstance(value, Computed)
        }
        for name, metric in own.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged
