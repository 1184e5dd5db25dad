"""The learning rates as metrics."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from raysgd.callbacks.base import Callback, Trainer
from raysgd.errors import WorkerLostError

__all__ = ["LearningRateLogger", "learning_rates"]

logger = logging.getLogger(__name__)


class LearningRateLogger(Callback):
    """Adds the learning rates at the end of each call to the metrics of training.

    The name is ``lr``; with several optimizers ``lr-0``, ``lr-1``; and with several parameter
    groups ``lr/group0``, ``lr/group1``.
    """

    stage: ClassVar[int] = -1  # run before the loggers

    def on_epoch_end(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        try:
            metrics.update(trainer.apply_all_operators(learning_rates)[0])
        except WorkerLostError as error:  # the next call repairs the group
            logger.warning("No learning rates for epoch %d: %s", trainer.epoch, error)

    on_steps_end = on_epoch_end


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
