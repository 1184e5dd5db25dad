"""Names that users know: the batch-size key, meters and timers."""

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
]
