"""Public helpers: the batch-size key, meters, and timers."""

from collections.abc import Callable
from typing import TypeVar

from raysgd._internal.config import BATCH_SIZE
from raysgd._internal.timers import TimerCollection, TimerStat
from raysgd.metrics import BATCH_COUNT, NUM_SAMPLES, AverageMeter, AverageMeterCollection

__all__ = [
    "BATCH_COUNT",
    "BATCH_SIZE",
    "NUM_SAMPLES",
    "AverageMeter",
    "AverageMeterCollection",
    "TimerCollection",
    "TimerStat",
    "override",
]

_Method = TypeVar("_Method", bound=Callable[..., object])


def override(overridden: type) -> Callable[[_Method], _Method]:
    """Mark a method that overrides a method of `overridden`, for older scripts."""

    def mark(method: _Method) -> _Method:
        getattr(overridden, method.__name__)
        return method

    return mark
