"""Names that users know: the batch-size key, meters and timers."""

from collections.abc import Callable
from typing import TypeVar

from raysgd.config import BATCH_SIZE
from raysgd.metrics import BATCH_COUNT, NUM_SAMPLES, AverageMeter, AverageMeterCollection
from raysgd.timers import TimerCollection, TimerStat

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
    """Mark a method as one that overrides a method of another class, as older scripts do.

    Raises:
        AttributeError: if that class has none of the name.
    """

    def marked(method: _Method) -> _Method:
        getattr(overridden, method.__name__)
        return method

    return marked
