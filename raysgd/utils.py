"""Public helpers: the batch-size key, meters, and timers."""

from raysgd._internal.config import BATCH_SIZE
from raysgd._internal.timers import TimerCollection
from raysgd.compat.ray_sgd import override
from raysgd.compat.timers import TimerStat
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
