"""A search for the learning rate, by a short training with one that grows."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["LearningRates", "geometric", "set_rate", "suggested"]

_SMOOTHING = 0.9


class LearningRates(NamedTuple):
    """What ``trainer.find_learning_rate()`` has seen."""

    suggestion: float | None
    """The rate at which the loss fell fastest; None where it never fell."""
    rates: list[float]
    """The rates that were tried."""
    losses: list[float]
    """The loss of the step at each, before its update."""


def geometric(lowest: float, highest: float, number: int) -> list[float]:
    """Return so many rates, each the same multiple of the one before.

    >>> geometric(0.01, 1.0, 3)
    [0.01, 0.1, 1.0]
    """
    return [float(rate) for rate in np.geomspace(lowest, highest, number)]


def set_rate(rate: float) -> functools.partial[None]:
    """Return a function that gives all optimizers of an operator a learning rate."""
    return functools.partial(_set_rate, rate)


def _set_rate(rate: float, operator: Any) -> None:
    for optimizer in operator._train_state.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


def suggested(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """Return the rate at which the smoothed loss falls fastest by the logarithm of the rate.

    The first tenth is left out, where the mean is of a few steps.
    """
    smooth: list[float] = []
    mean = 0.0
    for number, loss in enumerate(losses, start=1):
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
        smooth.append(mean / (1 - _SMOOTHING**number))
    if len(smooth) < 3:
        return None
    slopes = np.gradient(smooth, [math.log(rate) for rate in rates[: len(smooth)]])
    first = len(smooth) // 10
    steepest = first + int(np.argmin(slopes[first:]))
    return rates[steepest] if slopes[steepest] < 0 else None
