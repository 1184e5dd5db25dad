"""Public helpers: the batch-size key, meters, and timers."""

from raysgd._internal.config import BATCH_SIZE as BATCH_SIZE
from raysgd._internal.timers import TimerCollection as TimerCollection
from raysgd.compat.ray_sgd import override as override
from raysgd.compat.timers import TimerStat as TimerStat
from raysgd.metrics import BATCH_COUNT as BATCH_COUNT
from raysgd.metrics import NUM_SAMPLES as NUM_SAMPLES
from raysgd.metrics import AverageMeter as AverageMeter
from raysgd.metrics import AverageMeterCollection as AverageMeterCollection

__all__ = sorted(name for name in globals() if not name.startswith("_"))
