"""Callbacks that ask the workers for further metrics of training."""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any, ClassVar

import psutil

from raysgd.callbacks.base import Callback, Trainer
from raysgd.errors import WorkerLostError

logger = logging.getLogger(__name__)


class _Measuring(Callback):
    stage: ClassVar[int] = -1  # run before the loggers

    def measure(self, trainer: Trainer) -> dict[str, float]:
        """Return the metrics to add."""
        raise NotImplementedError

    def on_epoch_end(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        try:
            metrics.update(self.measure(trainer))
        except WorkerLostError as error:  # the next call repairs the group
            name = type(self).__name__
            logger.warning("%s has no metrics for epoch %d: %s", name, trainer.epoch, error)

    on_steps_end = on_epoch_end


class DeviceStats(_Measuring):
    """Adds the resource use of the workers' processes to the metrics of training.

    ``memory_mib`` is the largest resident memory of a worker. ``cpu_percent`` is the mean CPU use
    since the last call (100 is one core). ``gpu_memory_mib``, if PyTorch uses GPUs, is the largest
    peak of allocated GPU memory since the last call.
    """

    def measure(self, trainer: Trainer) -> dict[str, float]:
        found = trainer.apply_all_operators(_resource_use)
        metrics: dict[str, float] = {
            name: max(each[name] for each in found)
            for name in ("memory_mib", "gpu_memory_mib")
            if all(name in each for each in found)
        }
        metrics["cpu_percent"] = sum(each["cpu_percent"] for each in found) / len(found)
        return metrics


def _resource_use(operator: Any) -> dict[str, float]:
    """Return the resource use of this process. Runs on the worker."""
    process = _process()
    used = {"memory_mib": process.memory_info().rss / 2**20, "cpu_percent": process.cpu_percent()}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        used["gpu_memory_mib"] = torch.cuda.max_memory_allocated() / 2**20
        torch.cuda.reset_peak_memory_stats()
    return used


@functools.cache
def _process() -> psutil.Process:
    return psutil.Process()  # `cpu_percent` needs the time of its last call


class LearningRateLogger(_Measuring):
    """Adds the learning rates at the end of each call to the metrics of training.

    The name is ``lr``; with several optimizers ``lr-0``, ``lr-1``; and with several parameter
    groups ``lr/group0``, ``lr/group1``.
    """

    def measure(self, trainer: Trainer) -> dict[str, float]:
        rates: dict[str, float] = trainer.apply_all_operators(learning_rates)[0]
        return rates


def learning_rates(operator: Any) -> dict[str, float]:
    """Return the learning rates of an operator. Runs on the worker."""
    optimizers, rates = operator._train_state.optimizers, {}
    for number, optimizer in enumerate(optimizers):
        name = "lr" if len(optimizers) == 1 else f"lr-{number}"
        found = _rates_of(optimizer)
        for index, rate in enumerate(found):
            rates[name if len(found) == 1 else f"{name}/group{index}"] = rate
    return rates


def _rates_of(optimizer: Any) -> list[float]:
    if hasattr(optimizer, "param_groups"):
        return [float(group["lr"]) for group in optimizer.param_groups]
    rate = optimizer.learning_rate  # in Keras with several workers, float() rejects the variable
    return [float(rate.numpy() if hasattr(rate, "numpy") else rate)]
