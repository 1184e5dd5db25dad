"""Resource use of the workers as metrics."""

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
    """Adds the resource use of the workers' processes to the metrics of training.

    ``memory_mib`` is the largest resident memory of a worker. ``cpu_percent`` is the mean CPU use
    since the last call (100 is one core). ``gpu_memory_mib``, if PyTorch uses GPUs, is the largest
    peak of allocated GPU memory since the last call.
    """

    stage: ClassVar[int] = -1  # run before the loggers

    def on_epoch_end(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        try:
            found = trainer.apply_all_operators(_resource_use)
        except WorkerLostError as error:  # the next call repairs the group
            logger.warning("No device statistics for epoch %d: %s", trainer.epoch, error)
            return
        metrics["memory_mib"] = max(each["memory_mib"] for each in found)
        metrics["cpu_percent"] = sum(each["cpu_percent"] for each in found) / len(found)
        if all("gpu_memory_mib" in each for each in found):
            metrics["gpu_memory_mib"] = max(each["gpu_memory_mib"] for each in found)

    on_steps_end = on_epoch_end


def _resource_use(operator: Any) -> dict[str, float]:
    """Return the resource use of this process. Runs on the worker."""
    process = _process()
    used = {"memory_mib": process.memory_info().rss / _MIB, "cpu_percent": process.cpu_percent()}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        used["gpu_memory_mib"] = torch.cuda.max_memory_allocated() / _MIB
        torch.cuda.reset_peak_memory_stats()
    return used


@functools.cache
def _process() -> psutil.Process:
    return psutil.Process()  # it remembers the time of its last `cpu_percent`
