"""The learning rates as metrics."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from raysgd.callbacks.base import Callback, Trainer
from raysgd.errors import WorkerLostError

__all__ = ["LearningRateLogger", "learning_rates"]

logger = logging.getLogger(__name__)


class LearningRateLogger(Callback):
    """Adds the learning rate of every optimizer to the metrics of training, as at its end.

    The name is ``lr``; with several optimizers ``lr-0``, ``lr-1``, and with several parameter
    groups ``lr/group0``, ``lr/group1``. Loggers and the caller of ``train()`` see it.
    """

    stage: ClassVar[int] = -1  # before the loggers

    def on_epoch_end(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        """Add the rates."""
        try:
            metrics.update(trainer.apply_all_operators(learning_rates)[0])
        except WorkerLostError as error:
            # the next call mends the group; a run is not to end for want of this number
            logger.warning("No learning rates of epoch %d: %s", trainer.epoch, error)

    def on_steps_end(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        """Add the rates."""
        self.on_epoch_end(trainer, metrics)


def learning_rates(operator: Any) -> dict[str, float]:
    """Return the rates of an operator. Runs on the worker."""
    optimizers, rates = operator._train_state.optimizers, {}
    for number, optimizer in enumerate(optimizers):
        name = "lr" if len(optimizers) == 1 else f"lr-{number}"
        found = _rates_of(optimizer)
        for index, rate in enumerate(found):
            rates[name if len(found) == 1 else f"{name}/group{index}"] = rate
    return rates


def _rates_of(optimizer: Any) -> list[float]:
    """Return the rate of each parameter group of torch's, or the one of Keras."""
    if hasattr(optimizer, "param_groups"):
        return [float(group["lr"]) for group in optimizer.param_groups]
    rate = optimizer.learning_rate
    # several workers hold a variable each, which is no number for Python
    return [float(rate.numpy() if hasattr(rate, "numpy") else rate)]
