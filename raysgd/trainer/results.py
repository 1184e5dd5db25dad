"""The arguments of ``fit()``, and the metrics of training and validation for the callbacks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from raysgd._internal.arguments import check_dict, check_int, set_fields
from raysgd.callbacks.base import LastCall, Trainer
from raysgd.loop.requests import TrainRequest, ValidateRequest
from raysgd.metrics import BATCH_COUNT, NUM_SAMPLES
from raysgd.trainer.dispatcher import CallResult, Dispatcher


@dataclass(frozen=True)
class FitOptions:
    """See :meth:`raysgd.TorchTrainer.fit`. The defaults mean that no ``fit()`` runs."""

    num_epochs: Any = None
    validate_every: int | None = None
    max_retries: int = 0
    info: dict[str, Any] | None = None
    log_every: int | None = None
    max_steps: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_epochs", "validate_every", "max_steps", "log_every"):
            if (value := getattr(self, name)) is not None:
                set_fields(self, **{name: check_int("fit", name, value, 1)})
        set_fields(self, max_retries=check_int("fit", "max_retries", self.max_retries, 0))
        check_dict("fit", "info", self.info)


@dataclass(eq=False)
class ResultReporter:
    """Reports the metrics of one trainer, and tracks whether the newest epoch lacks a validation.

    The result of an epoch has the metrics of its training, and of the validation that ``fit()``
    makes after it.
    """

    dispatcher: Dispatcher
    running: FitOptions = field(default_factory=FitOptions)
    """The arguments of the running ``fit()``."""
    has_validated: bool = False
    """Whether a validation has run, so that ``fit()`` need not try it."""
    validation_names: set[str] = field(default_factory=set)
    """Names of the metrics of validations."""
    _num_validated: int = 0
    """Number of epochs that need no validation anymore."""
    _due_at: int | None = None
    """Step at which a validation was missing when a ``fit()`` ended or a state was saved."""
    _results: list[tuple[dict[str, Any], LastCall]] = field(default_factory=list)
    """Metrics of the newest training, and of its validation, unless that had a result."""

    @contextlib.contextmanager
    def fitting(self, options: FitOptions) -> Iterator[None]:
        """Apply the arguments of ``fit()``. At its end, record whether a validation is missing."""
        self.running, self._num_validated = options, self.num_completed
        try:
            yield
        finally:
            self._set_due_validation(self.lacks_validation)
            self.running = FitOptions()

    def train_request(self, **arguments: Any) -> TrainRequest:
        """Return a request to train, within the limits of the running ``fit()``."""
        until_step, log_every = self.running.max_steps, self.running.log_every
        arguments["call_number"] = next(self.dispatcher.call_numbers)
        return TrainRequest(until_step=until_step, log_every=log_every, **arguments)

    def report_training(
        self, trainer: Trainer, metrics: dict[str, Any], result: CallResult
    ) -> None:
        """Pass the metrics of ``train()`` to the callbacks."""
        self._results = [(metrics, result.call)]
        hook = "on_epoch_end" if result.completed_epoch else "on_steps_end"
        self.dispatcher.report(hook, trainer, metrics, result.call)
        if result.completed_epoch and not self.is_due:
            self._report_result(trainer)

    def validate(
        self,
        trainer: Trainer,
        info: Mapping[str, Any] | None,
        num_steps: int | None = None,
        profile: bool = False,
        from_start: bool = False,
    ) -> CallResult:
        """Run a validation, and pass its metrics to the callbacks."""
        self.dispatcher.check_open(changes_state=True)
        with self.dispatcher.callback_list.enter_call(trainer):
            request = ValidateRequest(
                call_number=next(self.dispatcher.call_numbers),
                num_steps=num_steps,
                from_start=from_start,
                info=dict(info or {}),
                profile=profile,
            )
            result = self.dispatcher.validate(trainer, request)
            self.has_validated = True
            self._due_at, self._num_validated = None, self.num_completed
            if result.call.is_complete:  # otherwise the user looks at some batches
                self._results[1:] = [(result.merged, result.call)] if self._results else []
            self.dispatcher.report("on_validation_end", trainer, result.merged, result.call)
            self.validation_names.update(result.merged)
            if len(self._results) > 1:
                self._report_result(trainer)
        return result

    def _report_result(self, trainer: Trainer) -> None:
        """Pass the result of an epoch to the callbacks, unless a callback made the call."""
        if self.dispatcher.callback_list.running_hooks:
            return
        merged: dict[str, Any] = {}
        seconds = 0.0
        for metrics, call in self._results:
            merged |= metrics
            seconds += call.seconds
        if call.kind == "validate":
            self._results = []
        else:
            names = self.validation_names - {NUM_SAMPLES, BATCH_COUNT}
            merged = {name: value for name, value in merged.items() if name not in names}
        whole = call._replace(seconds=seconds)
        self.dispatcher.callback_list.call("on_result", trainer, whole, merged)

    # ---- missing validations

    @property
    def num_completed(self) -> int:
        return self.dispatcher.controller.progress.epoch

    @property
    def is_due(self) -> bool:
        """Whether ``fit()`` validates after the newest completed epoch."""
        every, completed = self.running.validate_every, self.num_completed
        if every is None:
            return False
        return completed % every == 0 or completed >= self.running.num_epochs

    @property
    def lacks_validation(self) -> bool:
        """Whether the validation of the newest epoch is missing, and no training followed."""
        if self._due_at == self.dispatcher.controller.progress.global_step:
            return True
        return self.num_completed > self._num_validated and self.is_due

    def _set_due_validation(self, is_due: bool) -> None:
        self._due_at = self.dispatcher.controller.progress.global_step if is_due else None

    def restore_due_validation(self, due: dict[str, Any] | None) -> None:
        """Record the metrics of the loaded epoch if its validation is missing, otherwise None."""
        self._set_due_validation(due is not None)
        self._results = [] if due is None else [(due, LastCall("train", time.time(), 0.0))]
