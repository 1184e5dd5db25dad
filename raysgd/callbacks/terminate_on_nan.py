"""Stopping when the loss is no number any more."""

from __future__ import annotations

import math
from typing import Any

from raysgd.callbacks.base import Callback, Trainer
from raysgd.callbacks.values import numbers_in

__all__ = ["TerminateOnNaN"]


class TerminateOnNaN(Callback):
    """Asks ``fit()`` to stop after an epoch with a loss that is NaN or infinite.

    A loss is a metric of training or of validation with ``loss`` in its name. The epoch is saved by
    a CheckpointCallback that has no `monitor`; with one the best stays the last that was finite.
    """

    def on_epoch_end(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        """Look at the losses."""
        for name, value in numbers_in(metrics).items():
            if "loss" in name and not math.isfinite(value):
                trainer.request_stop(f"{name} is {value} in epoch {trainer.epoch}.")

    on_validation_end = on_steps_end = on_epoch_end
