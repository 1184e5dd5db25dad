"""The learning rate search: a short training with a growing learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_SMOOTHING = 0.9


class LearningRates(NamedTuple):
    """The result of ``trainer.find_learning_rate()``."""

    suggestion: float | None
    """The rate at which the loss fell fastest. None if it never fell."""
    rates: list[float]
    """The tested rates."""
    losses: list[float]
    """The loss at each rate, before the update."""


def set_rate(operator: Any, rate: float) -> None:
    for optimizer in operator._train_state.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


def suggested(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """Return the rate at which the smoothed loss falls fastest over the logarithm of the rate.

    The first tenth of the rates does not count, because its smoothed losses cover few steps.
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
