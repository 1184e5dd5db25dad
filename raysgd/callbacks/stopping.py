"""Callbacks that stop ``fit()``."""

import math
from typing import Any, Literal

from raysgd._internal.arguments import as_int, check_number, resolve_mode
from raysgd._internal.nonfinite import nonfinite_loss
from raysgd._internal.values import missing_metric, numbers_in
from raysgd.callbacks.base import AnyTrainer, Callback, CallInfo


class EarlyStopping(Callback):
    """Stops ``fit()`` when a metric has not improved for `patience` epochs in a row.

    A saved state includes this callback. A run that was stopped does not train again, and a resumed
    one stops when the whole run would, unless it resumes within an epoch and monitors `train_loss`,
    which then omits the start of that epoch.

    Args:
        monitor: name of a metric. If training and validation have it, the one of validation counts.
        mode: "min" if smaller values are better, or "max". None: from the name of the metric, as
            "max" for ``val_accuracy``.
        patience: number of epochs without improvement. Several values of an epoch count once.
        min_delta: smallest change that counts as an improvement.

    Raises:
        ValueError: if an argument is not allowed; in training, if there is no such metric, or it is
            not a number.
        TypeError: if an argument has another type.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        mode: Literal["min", "max"] | None = None,
        patience: int = 3,
        min_delta: float = 0.0,
    ) -> None:
        mode = resolve_mode("EarlyStopping", monitor, mode)
        check_number("EarlyStopping", "min_delta", min_delta)
        self.monitor: str = monitor
        self._sign = 1.0 if mode == "min" else -1.0
        self._patience = as_int("EarlyStopping", "patience", patience, 1)
        self._min_delta = min_delta
        self.best_value: float | None = None
        """The best value so far; None before the first."""
        self.num_waited = 0
        """Number of epochs since the best value."""
        self._epoch = -1  # of the newest value

    def _forget_run(self) -> None:
        self.best_value, self.num_waited, self._epoch = None, 0, -1

    def on_train_start(self, trainer: AnyTrainer) -> None:
        self._stop_if_due(trainer)

    def on_epoch_result(self, trainer: AnyTrainer, call: CallInfo, metrics: dict[str, Any]) -> None:
        known = trainer.latest_metrics
        if self.monitor in metrics:
            self._compare(trainer, metrics[self.monitor])
        elif call.kind == "validate" and "epoch" in metrics and self.monitor not in known:
            raise ValueError(missing_metric("EarlyStopping", self.monitor, known))

    def _compare(self, trainer: AnyTrainer, measured: Any) -> None:
        if (value := numbers_in({"value": measured}).get("value")) is None:
            raise ValueError(
                f"EarlyStopping(monitor={self.monitor!r}): the metric must be a number, but it is "
                f"{measured!r}."
            )
        if self.best_value is None:
            is_better = not math.isnan(value)
        else:
            is_better = self._sign * (self.best_value - value) > self._min_delta  # False for NaN
        if is_better:
            self.best_value, self.num_waited = value, 0
        elif trainer.epoch != self._epoch:  # several validations of an epoch count once
            self.num_waited += 1
        self._epoch = trainer.epoch
        self._stop_if_due(trainer)

    def _stop_if_due(self, trainer: AnyTrainer) -> None:
        if self.num_waited >= self._patience:
            best = self.best_value
            found = "it was always NaN" if best is None else f"the best is {best:.6g}"
            trainer.request_stop(
                f"{self.monitor} has not improved for {self.num_waited} epochs in a row; {found}."
            )

    def state_dict(self) -> dict[str, Any]:
        return {
            "monitor": self.monitor,
            "best": self.best_value,
            "num_waited": self.num_waited,
            "epoch": self._epoch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["monitor"] == self.monitor:
            self.best_value, self.num_waited = state["best"], state["num_waited"]
            self._epoch = state.get("epoch", -1)


class TerminateOnNaN(Callback):
    """Stops ``fit()`` at a loss that is NaN or infinite.

    A loss is a metric of training or validation with ``loss`` in its name. All workers compare the
    losses that ``train_batch`` returns after each update, so that ``train()`` ends in that step. A
    CheckpointCallback keeps the checkpoints before it.
    """

    stops_at_nan: bool = True

    def on_epoch_end(self, trainer: AnyTrainer, metrics: dict[str, Any]) -> None:
        if bad := nonfinite_loss(numbers_in(metrics)):
            trainer.request_stop(f"{bad} in epoch {trainer.epoch}, step {trainer.global_step}.")

    on_validation_end = on_partial_epoch_end = on_epoch_end
