"""The loop of ``trainer.fit()``, and the validations and results of epochs."""

import contextlib
import itertools
import logging
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raysgd._internal.arguments import as_dict, as_int, set_fields
from raysgd.callbacks.base import Callback, History, LastCall, Trainer
from raysgd.callbacks.callback_list import as_callbacks
from raysgd.callbacks.progress import EpochLines, ProgressBar, is_interactive
from raysgd.driver.dispatcher import CallResult, Dispatcher
from raysgd.loop.operator_base import has_validation_loader
from raysgd.loop.options import Options
from raysgd.loop.requests import ApplyOperatorRequest, TrainRequest, ValidateRequest
from raysgd.loop.sources import missing_loader_error
from raysgd.metrics import BATCH_COUNT, NUM_SAMPLES, merge_workers

logger = logging.getLogger(__name__)

_SANITY_STEPS = 2
"""Number of batches on which the first ``fit()`` tries the validation before it trains."""
_OF_VALIDATION = re.compile(r"val(?![a-z])|valid|eval[_/]")  # and not "value"


@dataclass(frozen=True)
class FitArguments:
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
                set_fields(self, **{name: as_int("fit", name, value, 1)})
        set_fields(self, max_retries=as_int("fit", "max_retries", self.max_retries, 0))
        as_dict("fit", "info", self.info)


@dataclass(eq=False)
class _EpochResult:
    """What callbacks receive in ``on_result``: a training, and the validation after it."""

    metrics: dict[str, Any]
    call: LastCall
    validation: CallResult | None = None


@dataclass(eq=False)
class FitLoop:
    """Runs ``fit()`` of one trainer, and tracks whether the newest epoch lacks a validation.

    The result of an epoch has the metrics of its training, and of the validation that ``fit()``
    makes after it::

        fit -> check the validation on a few batches
               if an exception or a save preceded the validation of an epoch: validate
               until num_epochs, a limit, or request_stop:
                   trainer.train()
                   if validate_every divides the epoch, or it is num_epochs: validate
    """

    options: Options
    dispatcher: Dispatcher
    stop_reason: str | None = None
    fit_arguments: FitArguments = field(default_factory=FitArguments)
    """The arguments of the running ``fit()``."""
    validation_names: set[str] | None = None
    """Names of the metrics of validations. None: ``fit()`` tries one on a few batches."""
    _num_validated_epochs: int = 0
    """Number of epochs that need no validation anymore."""
    _due_step: int | None = None
    """Step at which a validation was missing when a ``fit()`` ended or a state was saved."""
    _epoch_result: _EpochResult | None = None
    """The result of the newest training, until it is reported with a validation."""

    def run(
        self,
        trainer: Trainer,
        arguments: FitArguments,
        callbacks: Iterable[Callback],
        verbose: bool,
    ) -> History:
        """Train until `num_epochs` are completed, a limit is reached, or a callback stops it."""
        if (arguments.num_epochs or arguments.max_steps) is None:
            raise TypeError("fit(num_epochs=None): must be an int, unless max_steps is given.")
        arguments = replace(arguments, num_epochs=arguments.num_epochs or sys.maxsize)
        dispatcher, callback_list = self.dispatcher, self.dispatcher.callback_list
        where = f"{type(trainer).__name__}.fit(callbacks=...)"
        added = as_callbacks(where, callbacks, trainer.logdir, callback_list)
        kinds = (EpochLines, ProgressBar) if is_interactive() else (EpochLines,)
        for kind in kinds if verbose else ():
            if not any(isinstance(each, kind) for each in (*added, *callback_list)):
                added.insert(0, kind())
        dispatcher.check_open(changes_state=True)
        if callback_list.running_hooks:
            raise RuntimeError(
                f"A callback cannot call fit() in {callback_list.running_hooks[-1]}. "
                "Call it outside of hooks."
            )
        self.stop_reason = None
        with callback_list.attach(trainer, added):
            why = "fit() does not validate."
            request = ApplyOperatorRequest(function=has_validation_loader)
            if arguments.validate_every and not any(dispatcher.run(request, method="fit")):
                why = f"{why} {missing_loader_error('validation')}"
                arguments = replace(arguments, validate_every=None)
                logger.info("%s", why)
            if arguments.validate_every is None:
                _check_monitored(self._monitored_metrics(), (), why)
            self.fit_arguments, self._num_validated_epochs = arguments, self.num_completed_epochs
            try:
                if arguments.validate_every and self.num_completed_epochs < arguments.num_epochs:
                    self._run_sanity_check()
                history = self._train_epochs(trainer)
            finally:
                self._due_step = dispatcher.position.global_step if self.lacks_validation else None
                self.fit_arguments = FitArguments()
            if sentence := dispatcher.controller.speed.report().sentence:
                logger.warning("%s", sentence)
            return history

    def _train_epochs(self, trainer: Trainer) -> History:
        history, arguments = History(), self.fit_arguments
        num_epochs = arguments.num_epochs

        def reason_to_end() -> str | None:
            if arguments.max_steps is not None and trainer.global_step >= arguments.max_steps:
                return self.stop_reason or f"max_steps={arguments.max_steps} is reached"
            return self.stop_reason

        if self.lacks_validation and self.is_validation_due:  # since an earlier fit()
            if self.dispatcher.metrics.get("epoch") != self.num_completed_epochs:
                self.restore_due_validation({})  # Ctrl-C in the last step has lost its metrics
            self.validate(trainer, arguments.info, from_start=True)
        if self.num_completed_epochs >= num_epochs:
            logger.warning(
                "fit(%d) trains nothing, because the run has already completed epoch %d.",
                num_epochs,
                self.num_completed_epochs,
            )
        while reason_to_end() is None and self.num_completed_epochs < num_epochs:
            start = self.dispatcher.position
            metrics = trainer.train(max_retries=arguments.max_retries, info=arguments.info)
            had_no_batch = start.in_epoch and metrics.keys() == {"epoch"}
            if self.num_completed_epochs > start.epoch and self.is_validation_due:
                validated = self.validate(trainer, arguments.info, from_start=True).merged
                metrics = {**validated, **metrics}
            history += [] if had_no_batch else [metrics]
            if len(history) == 1 and arguments.validate_every is None:
                for argument, name in self._monitored_metrics().items():
                    if name not in history[0]:
                        logger.warning("%s: the first epoch has no such metric.", argument)
        history.stop_reason = f"num_epochs={num_epochs} is reached"
        if (reason := reason_to_end()) is not None and self.num_completed_epochs < num_epochs:
            history.stop_reason = reason
            level = logging.INFO if history else logging.WARNING
            logger.log(level, "fit() ends at step %d: %s", trainer.global_step, reason)
        return history

    # ---- calls and their results

    def train_request(self, info: dict[str, Any], profile: bool, dataset: Any) -> TrainRequest:
        """Return a request to train, within the limits of the running ``fit()``."""
        return TrainRequest(
            call_number=next(self.dispatcher.call_numbers),
            adds_epoch=self.fit_arguments.num_epochs is None,
            until_step=self.fit_arguments.max_steps,
            log_every=self.fit_arguments.log_every,
            info=info,
            profile=profile,
            dataset=dataset,
        )

    def report_training(self, trainer: Trainer, result: CallResult) -> None:
        """Pass the metrics of ``train()`` to the callbacks."""
        if not result.has_trained:
            return self.restore_due_validation({})
        self._epoch_result = _EpochResult(result.merged, result.last_call)
        hook = "on_epoch_end" if result.has_completed_epoch else "on_steps_end"
        try:
            self.dispatcher.report(hook, trainer, result.merged, result.last_call)
        finally:  # also after Ctrl-C in a callback
            if result.has_completed_epoch and not self.is_validation_due:
                self._report_result(trainer)
        self.dispatcher.callback_list.notify_pause(trainer)  # of those that save

    def validate(
        self,
        trainer: Trainer,
        info: Mapping[str, Any] | None,
        num_steps: int | None = None,
        profile: bool = False,
        from_start: bool = False,
    ) -> CallResult:
        """Run a validation, and pass its metrics to the callbacks."""
        if num_steps is not None:
            num_steps = as_int("validate", "num_steps", num_steps, 1)
        info = as_dict("validate", "info", info)
        self.dispatcher.check_open(changes_state=True)
        with self.dispatcher.callback_list.within_call(trainer):
            request = ValidateRequest(
                call_number=next(self.dispatcher.call_numbers),
                num_steps=num_steps,
                info=info,
                profile=profile,
            )
            result = self.dispatcher.validate(trainer, request, from_start)
            metrics, call = result.merged, result.last_call
            if call.is_complete and self._epoch_result is not None:
                self._epoch_result.validation = result
            try:
                self.dispatcher.report("on_validation_end", trainer, metrics, call)
            finally:  # also after Ctrl-C in a callback
                self.validation_names = {*(self.validation_names or ()), *metrics}
                if call.is_complete:  # after the hook, because a state it saves lacks `on_result`
                    self._due_step, self._num_validated_epochs = None, self.num_completed_epochs
                if self._epoch_result is not None and self._epoch_result.validation is not None:
                    self._report_result(trainer)
        return result

    def _report_result(self, trainer: Trainer) -> None:
        """Pass the result of an epoch to callbacks, unless one made the call or loaded a state."""
        if self.dispatcher.callback_list.running_hooks or (result := self._epoch_result) is None:
            return
        metrics, call = result.metrics, result.call
        if (validation := result.validation) is None:
            names = (self.validation_names or set()) - {NUM_SAMPLES, BATCH_COUNT}
            metrics = {name: value for name, value in metrics.items() if name not in names}
        else:
            metrics = {**metrics, **validation.merged}
            seconds = call.seconds + validation.last_call.seconds
            call, self._epoch_result = validation.last_call._replace(seconds=seconds), None
        self.dispatcher.callback_list.call_hook("on_result", trainer, call, metrics)

    # ---- missing validations

    @property
    def num_completed_epochs(self) -> int:
        return self.dispatcher.position.epoch

    @property
    def is_validation_due(self) -> bool:
        """Whether ``fit()`` validates after the newest completed epoch."""
        every, done = self.fit_arguments.validate_every, self.num_completed_epochs
        return bool(every and (done % every == 0 or done >= self.fit_arguments.num_epochs))

    @property
    def lacks_validation(self) -> bool:
        """Whether the validation of the newest epoch is missing, and no training followed."""
        if self._due_step == self.dispatcher.position.global_step:
            return True
        return self.num_completed_epochs > self._num_validated_epochs and self.is_validation_due

    def restore_due_validation(self, due: dict[str, Any] | None) -> None:
        """Record the metrics of the loaded epoch if its validation is missing, otherwise None."""
        self._due_step = None if due is None else self.dispatcher.position.global_step
        self._num_validated_epochs = self.num_completed_epochs
        call = LastCall("train", time.time(), 0.0)
        self._epoch_result = None if due is None else _EpochResult(due, call)

    # ---- checks

    def _run_sanity_check(self) -> None:
        """Validate some batches before training, unless a validation has run or runs next."""
        has_validated = self.validation_names is not None
        if has_validated or self.lacks_validation or self.stop_reason is not None:
            return
        request = ValidateRequest(
            call_number=-1,
            num_steps=_SANITY_STEPS,
            is_sanity_check=True,
            info=dict(self.fit_arguments.info or {}),
        )
        try:
            # A worker without a batch has no metrics.
            results = [*filter(None, self.dispatcher.run(request, method="fit", has_batches=True))]
            # A few batches may not suffice for a metric.
            with contextlib.suppress(ValueError, RuntimeError, ArithmeticError, LookupError):
                results.append(merge_workers(results))
            if names := dict.fromkeys(itertools.chain.from_iterable(results)):
                why = f"a validation has: {', '.join(names)}."
                _check_monitored(self._monitored_metrics(), list(names), why)
            self.validation_names = {*names}
        except Exception as error:
            error.add_note("fit() tried the validation before any training.")
            error.__notes__.sort(key=lambda note: note.startswith("Raised on worker "))  # last
            raise

    def _monitored_metrics(self) -> dict[str, str]:
        """Return the monitored metrics by argument. Empty if operator or callbacks add metrics."""
        callbacks = list(self.dispatcher.callback_list)
        hooks = [hook for each in callbacks for hook in (each.on_epoch_end, each.on_validation_end)]
        methods = [self.options.training_operator_cls.train_epoch, *hooks]
        if not all(method.__module__.startswith("raysgd.") for method in methods):
            return {}
        named = [(type(each).__name__, each.monitor) for each in callbacks]
        return {f"{who}(monitor={name!r})": name for who, name in named if isinstance(name, str)}


def _check_monitored(monitored: Mapping[str, str], metrics: Sequence[str], why: str) -> None:
    """Check that monitored metrics of validation exist. Others may be metrics of training."""
    for argument, name in monitored.items():
        if name not in metrics and _OF_VALIDATION.match(name):
            raise ValueError(f"{argument}: there is no such metric, because {why}")
