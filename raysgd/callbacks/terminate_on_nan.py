"""Stopping at a loss that is not finite."""

from __future__ import annotations

import math
from typing import Any

from raysgd.callbacks.base import Callback, Trainer
from raysgd.callbacks.values import numbers_in

__all__ = ["TerminateOnNaN"]


class TerminateOnNaN(Callback):
    """Stops ``fit()`` after an epoch with a loss that is NaN or infinite.

    A loss is a metric of training or validation with ``loss`` in its name. A CheckpointCallback
    without `monitor` saves that epoch; with `monitor`, the best checkpoint stays a finite one.
    """

    def on_epoch_end(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        for name, value in numbers_in(metrics).items():
            if "loss" in name and not math.isfinite(value):
                trainer.request_stop(f"{name} is {value} in epoch {trainer.epoch}.")

    on_validation_end = on_steps_end = on_epoch_end
