"""Stopping when a metric has got no better for a while."""

from __future__ import annotations

import logging
import math
from typing import Any, Literal

from raysgd.callbacks.base import Callback, Trainer
from raysgd.callbacks.values import numbers_in, suggest_metric

__all__ = ["EarlyStopping"]

logger = logging.getLogger(__name__)


class EarlyStopping(Callback):
    """Asks ``fit()`` to stop when a metric has not improved for `patience` values in a row.

    Without training in between, further values do not count: they may only be better.

    What it has seen is saved with the trainer's state: a run that is resumed stops when it would
    have stopped, and one that had stopped trains no more.

    Args:
        monitor: name of the metric, of training or of validation; of validation where both have it.
        mode: "min" if smaller values are better, or "max".
        patience: how many values in a row may be no better.
        min_delta: by how much a value has to be better, to count.

    Raises:
        ValueError: if an argument has a value that is not allowed; in training, if there is no
            such metric, or it is no number.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        mode: Literal["min", "max"] = "min",
        patience: int = 3,
        min_delta: float = 0.0,
    ) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f'EarlyStopping(mode={mode!r}): must be "min" or "max".')
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise ValueError(f"EarlyStopping(patience={patience!r}): must be an int from 1 on.")
        if not 0 <= min_delta < math.inf:
            raise ValueError(f"EarlyStopping(min_delta={min_delta!r}): must be at least 0.")
        self.monitor = monitor
        self._sign = 1.0 if mode == "min" else -1.0
        self._patience = patience
        self._min_delta = min_delta
        self.best: float | None = None
        """The best value so far; None before the first."""
        self.num_waited = 0
        """Values since then."""
        self._of_validation = False
        self._num_epochs_missing = 0
        self._counted_at: int | None = None
        """The step of the newest value that counted."""

    def on_train_start(self, trainer: Trainer) -> None:
        """Stop at once where the run had stopped before it was resumed."""
        self._num_epochs_missing = 0
        if self.num_waited >= self._patience:
            self._stop(trainer)

    def on_epoch_end(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        """Look at the metrics of training."""
        if self._of_validation:
            return
        if not self._look(trainer, metrics):
            self._num_epochs_missing += 1
            if self._num_epochs_missing == 2:
                logger.warning(
                    "EarlyStopping(monitor=%r): two epochs are over without it. There are: %s.",
                    self.monitor,
                    ", ".join(trainer.latest_metrics),
                )

    def on_validation_end(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        """Look at the metrics of validation."""
        if self.monitor in metrics and not self._of_validation:
            # what training has of that name is another matter
            self._of_validation, self.best, self.num_waited = True, None, 0
        if not self._look(trainer, metrics) and self.monitor not in trainer.latest_metrics:
            raise ValueError(
                f"EarlyStopping(monitor={self.monitor!r}): there is no such metric. There are: "
                f"{', '.join(trainer.latest_metrics)}."
                + suggest_metric(str(self.monitor), trainer.latest_metrics)
            )

    def _look(self, trainer: Trainer, metrics: dict[str, Any]) -> bool:
        if self.monitor not in metrics:
            return False
        self._num_epochs_missing = 0
        value = numbers_in({"value": metrics[self.monitor]}).get("value")
        if value is None:
            raise ValueError(
                f"EarlyStopping(monitor={self.monitor!r}): it must be a number, but it is "
                f"{metrics[self.monitor]!r}."
            )
        if self._is_better(value):
            self.best, self.num_waited = value, 0
        elif self._counted_at != trainer.global_step:
            self.num_waited += 1
        self._counted_at = trainer.global_step
        if self.num_waited >= self._patience:
            self._stop(trainer)
        return True

    def _is_better(self, value: float) -> bool:
        if self.best is None:
            return not math.isnan(value)
        return self._sign * (self.best - value) > self._min_delta  # which NaN never is

    def _stop(self, trainer: Trainer) -> None:
        best = "it was nan each time" if self.best is None else f"it is {self.best:.6g} at best"
        trainer.request_stop(
            f"{self.monitor} has not improved for {self.num_waited} values in a row; {best}."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and how long ago it was."""
        return {
            "monitor": self.monitor,
            "best": self.best,
            "num_waited": self.num_waited,
            "of_validation": self._of_validation,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, if it is about the same metric."""
        best, num_waited = state["best"], state["num_waited"]
        if not isinstance(best, float | int | None) or not isinstance(num_waited, int):
            raise ValueError(f"This is no state of EarlyStopping: {state!r}.")
        if state["monitor"] == self.monitor:
            self.best, self.num_waited = best, num_waited
            self._of_validation = state.get("of_validation", False)
