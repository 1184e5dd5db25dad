"""What workers use of their devices, as metrics."""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any, ClassVar

import psutil

from raysgd.callbacks.base import Callback, Trainer
from raysgd.errors import WorkerLostError

__all__ = ["DeviceStats"]

logger = logging.getLogger(__name__)

_MIB = 2**20


class DeviceStats(Callback):
    """Adds what the workers' processes use to the metrics of training.

    ``memory_mib`` is the largest resident memory of a worker, ``cpu_percent`` the mean use of the
    processor since the call before (100 is one core), and ``gpu_memory_mib``, where torch uses
    GPUs, the largest peak of allocated GPU memory since the call before.
    """

    stage: ClassVar[int] = -1  # before the loggers

    def on_epoch_end(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        """Add the numbers."""
        try:
            found = trainer.apply_all_operators(_used)
        except WorkerLostError as error:
            # the next call mends the group; a run is not to end for want of these numbers
            logger.warning("No statistics of devices of epoch %d: %s", trainer.epoch, error)
            return
        metrics["memory_mib"] = max(each["memory_mib"] for each in found)
        metrics["cpu_percent"] = sum(each["cpu_percent"] for each in found) / len(found)
        if all("gpu_memory_mib" in each for each in found):
            metrics["gpu_memory_mib"] = max(each["gpu_memory_mib"] for each in found)

    on_steps_end = on_epoch_end


def _used(operator: Any) -> dict[str, float]:
    """Return what this process uses. Runs on the worker."""
    process = _process()
    used = {"memory_mib": process.memory_info().rss / _MIB, "cpu_percent": process.cpu_percent()}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        used["gpu_memory_mib"] = torch.cuda.max_memory_allocated() / _MIB
        torch.cuda.reset_peak_memory_stats()
    return used


@functools.cache
def _process() -> psutil.Process:
    return psutil.Process()  # which knows when it was last asked
