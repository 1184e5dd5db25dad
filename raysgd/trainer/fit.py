"""The loop of ``trainer.fit()``: epochs, validations, and stop conditions."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raysgd.callbacks.base import Callback, History, Trainer
from raysgd.callbacks.callback_list import as_callbacks
from raysgd.callbacks.progress import EpochLines, ProgressBar, is_interactive
from raysgd.loop.options import Options
from raysgd.loop.requests import ApplyOperatorRequest, ValidateRequest
from raysgd.loop.sources import missing_loader
from raysgd.metrics import merge_workers
from raysgd.trainer.dispatcher import Dispatcher
from raysgd.trainer.results import FitOptions, ResultReporter

logger = logging.getLogger(__name__)

_SANITY_STEPS = 2
"""Number of batches on which the first ``fit()`` tries the validation before it trains."""
_VALIDATION_PREFIXES = ("val", "eval_", "eval/")


@dataclass(eq=False)
class FitLoop:
    """Runs ``fit()`` of one trainer.

    ::

        fit -> check the validation on a few batches
               if an exception or a save preceded the validation of an epoch: validate
               until num_epochs, a limit, or request_stop:
                   trainer.train()
                   if validate_every divides the epoch, or it is the last: validate
    """

    options: Options
    dispatcher: Dispatcher
    reporter: ResultReporter
    stop_reason: str | None = None

    def run(
        self,
        trainer: Trainer,
        options: FitOptions,
        callbacks: Iterable[Callback],
        verbose: bool,
    ) -> History:
        """Train until `num_epochs` are completed, a limit is reached, or a callback stops it."""
        if options.num_epochs is None:
            if options.max_steps is None:
                raise TypeError("fit(num_epochs=None): must be an int, unless max_steps is given.")
            options = replace(options, num_epochs=sys.maxsize)
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
            if options.validate_every and not self._can_validate():
                why = f"{why} {missing_loader('validation')}"
                options = replace(options, validate_every=None)
                logger.info("%s", why)
            if options.validate_every is None:
                _check_monitors(self._find_monitors(), (), why)
            with self.reporter.fitting(options):
                if options.validate_every and self.reporter.num_completed < options.num_epochs:
                    self._check_validation(options.info)
                history = self._train_epochs(trainer, options)
                if sentence := dispatcher.controller.speed.report().sentence:
                    logger.warning("%s", sentence)
                return history

    def _train_epochs(self, trainer: Trainer, options: FitOptions) -> History:
        history, num_epochs, reporter = History(), options.num_epochs, self.reporter

        def end() -> str | None:
            if options.max_steps is not None and trainer.global_step >= options.max_steps:
                return self.stop_reason or f"max_steps={options.max_steps} is reached"
            return self.stop_reason

        if reporter.lacks_validation and reporter.is_due:  # since an earlier fit()
            reporter.validate(trainer, options.info, from_start=True)
        if reporter.num_completed >= num_epochs:
            logger.warning(
                "fit(%d) trains nothing, because the run has already completed epoch %d.",
                num_epochs,
                reporter.num_completed,
            )
        while end() is None and reporter.num_completed < num_epochs:
            epoch = reporter.num_completed
            history.append(trainer.train(max_retries=options.max_retries, info=options.info))
            if len(history) == 1 and options.validate_every is None:
                for argument, name in self._find_monitors().items():
                    if name not in history[0]:
                        logger.warning("%s: the first epoch has no such metric.", argument)
            if reporter.num_completed > epoch and reporter.is_due:
                validated = reporter.validate(trainer, options.info, from_start=True).merged
                history[-1] = {**validated, **history[-1]}
        history.stop_reason = f"num_epochs={num_epochs} is reached"
        if (reason := end()) is not None and reporter.num_completed < num_epochs:
            history.stop_reason = reason
            level = logging.INFO if history else logging.WARNING
            logger.log(level, "fit() ends at step %d: %s", trainer.global_step, reason)
        return history

    # ---- checks

    def _can_validate(self) -> bool:
        request = ApplyOperatorRequest(function=_has_validation_loader)
        return any(self.dispatcher.run(request, method="fit"))

    def _check_validation(self, info: Mapping[str, Any] | None) -> None:
        """Try the validation on some batches, unless a validation has run or runs next."""
        reporter = self.reporter
        if reporter.has_validated or reporter.lacks_validation or self.stop_reason is not None:
            return
        info = dict(info or {})
        request = ValidateRequest(
            call_number=-1, num_steps=_SANITY_STEPS, from_start=True, rehearses=True, info=info
        )
        try:
            # A worker without a batch has no metrics.
            answers = self.dispatcher.run(request, method="fit", has_batches=True)
            results = [each for each in answers if each]
            # A few batches may not suffice for a metric.
            with contextlib.suppress(ValueError, RuntimeError, ArithmeticError, LookupError):
                results.append(merge_workers(results))
            names = dict.fromkeys(itertools.chain.from_iterable(results))
            reporter.validation_names.update(names)
            if names:
                why = f"a validation has: {', '.join(names)}."
                _check_monitors(self._find_monitors(), list(names), why)
        except Exception as error:
            error.add_note("fit() tried the validation before any training.")
            error.__notes__.sort(key=lambda note: note.startswith("Raised on worker "))  # last
            raise
        reporter.has_validated = True

    def _find_monitors(self) -> dict[str, str]:
        """Return the monitored metrics by argument. Empty if operator or callbacks add metrics."""
        callbacks = list(self.dispatcher.callback_list)
        methods = [self.options.training_operator_cls.train_epoch]
        for each in callbacks:
            methods += [each.on_epoch_end, each.on_validation_end]
        if not all(method.__module__.startswith("raysgd.") for method in methods):
            return {}
        named = [(type(each).__name__, each.monitor) for each in callbacks]
        return {f"{who}(monitor={name!r})": name for who, name in named if isinstance(name, str)}


def _check_monitors(monitored: Mapping[str, str], metrics: Sequence[str], why: str) -> None:
    """Check that monitored metrics of validation exist. Others may be metrics of training."""
    for argument, name in monitored.items():
        if name in metrics:
            continue
        if name.startswith(_VALIDATION_PREFIXES):
            raise ValueError(f"{argument}: there is no such metric, because {why}")
        if f"val_{name}" in metrics:
            logger.warning("%s: validation has 'val_%s', but not this metric.", argument, name)


def _has_validation_loader(operator: Any) -> bool:
    return bool(operator._train_state.data.has("validation"))
