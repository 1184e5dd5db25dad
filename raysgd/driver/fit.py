"""The loop of ``trainer.fit()``."""

import contextlib
import itertools
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from raysgd.callbacks.base import AnyTrainer, Callback, History
from raysgd.callbacks.callback_list import as_callbacks
from raysgd.callbacks.progress import EpochPrinter, ProgressBar, is_interactive
from raysgd.driver.dispatcher import Dispatcher
from raysgd.driver.result_reporter import FitArguments
from raysgd.loop.operator_base import has_validation_loader
from raysgd.loop.options import Options
from raysgd.loop.requests import ApplyOperatorRequest, ValidateRequest
from raysgd.loop.sources import missing_loader_error
from raysgd.metrics import merge_worker_metrics

logger = logging.getLogger(__name__)

_SANITY_STEPS = 2
"""Number of batches on which the first ``fit()`` tries the validation before it trains."""
_OF_VALIDATION = re.compile(r"val(?![a-z])|valid|eval[_/]")  # and not "value"


@dataclass(eq=False)
class FitLoop:
    """A call of ``fit()``.

    These are its steps::

        check the validation on a few batches
        if an exception or a save preceded the validation of an epoch: validate
        until num_epochs, a limit, or request_stop:
            trainer.train()
            if validate_every divides the epoch, or it is num_epochs: validate
    """

    trainer: AnyTrainer
    options: Options
    dispatcher: Dispatcher
    arguments: FitArguments

    def run(self, callbacks: Iterable[Callback], verbose: bool) -> History:
        """Train until `num_epochs` are completed, a limit is reached, or a callback stops it."""
        trainer, dispatcher, arguments = self.trainer, self.dispatcher, self.arguments
        if (arguments.num_epochs or arguments.max_steps) is None:
            raise TypeError("fit(num_epochs=None): must be an int, unless max_steps is given.")
        callback_list = dispatcher.callback_list
        where = f"{type(trainer).__name__}.fit(callbacks=...)"
        added = as_callbacks(where, callbacks, trainer.logdir, callback_list)
        kinds = (EpochPrinter, ProgressBar) if is_interactive() else (EpochPrinter,)
        for kind in kinds if verbose else ():
            if not any(isinstance(each, kind) for each in (*added, *callback_list)):
                added.insert(0, kind())
        dispatcher.check_open(changes_state=True)
        if callback_list.running_hooks:
            raise RuntimeError(
                f"A callback cannot call fit() in {callback_list.running_hooks[-1]}. "
                "Call it outside of hooks."
            )
        dispatcher.stop_reason = None
        with callback_list.attach(added):
            why = "fit() does not validate."
            request = ApplyOperatorRequest(function=has_validation_loader)
            if arguments.validate_every and not any(dispatcher.run(request, method="fit")):
                why = f"{why} {missing_loader_error('validation')}"
                arguments = self.arguments = replace(arguments, validate_every=None)
                logger.info("%s", why)
            if arguments.validate_every is None:
                _check_monitored(self._monitored_metrics(), (), why)
            with dispatcher.reporter.within_fit(arguments):
                if arguments.validate_every and not dispatcher.reporter.has_all_epochs:
                    self._run_sanity_check()
                history = self._train_epochs()
            if advice := dispatcher.controller.speed.report().advice:
                logger.warning("%s", advice)
            return history

    def _train_epochs(self) -> History:
        trainer, dispatcher, arguments = self.trainer, self.dispatcher, self.arguments
        reporter, history = dispatcher.reporter, History()

        def reason_to_end() -> str | None:
            if reporter.has_all_epochs:
                return f"num_epochs={arguments.num_epochs} is reached"
            if arguments.max_steps is not None and trainer.global_step >= arguments.max_steps:
                return dispatcher.stop_reason or f"max_steps={arguments.max_steps} is reached"
            return dispatcher.stop_reason

        if reporter.lacks_validation and reporter.is_validation_due:  # since an earlier fit()
            # Ctrl-C in the last step has lost its metrics.
            if reporter.metrics.get("epoch") != reporter.num_completed_epochs:
                reporter.restore_due_validation({})
            dispatcher.validate(arguments.info, from_start=True)
        if reporter.has_all_epochs:
            logger.warning(
                "fit(%d) trains nothing, because the run has already completed epoch %d.",
                arguments.num_epochs,
                reporter.num_completed_epochs,
            )
        while (reason := reason_to_end()) is None:
            start = reporter.position
            metrics = trainer.train(max_retries=arguments.max_retries, info=arguments.info)
            had_no_batch = start.in_epoch and metrics.keys() == {"epoch"}
            has_completed_epoch = reporter.num_completed_epochs > start.num_completed_epochs
            if has_completed_epoch and reporter.is_validation_due:
                validated = dispatcher.validate(arguments.info, from_start=True).metrics
                metrics = {**validated, **metrics}
            history += [] if had_no_batch else [metrics]
            if len(history) == 1 and arguments.validate_every is None:
                for argument, name in self._monitored_metrics().items():
                    if name not in history[0]:
                        logger.warning("%s: the first epoch has no such metric.", argument)
        history.stop_reason = reason
        if not reporter.has_all_epochs:
            level = logging.INFO if history else logging.WARNING
            logger.log(level, "fit() ends at step %d: %s", trainer.global_step, reason)
        return history

    # ---- checks

    def _run_sanity_check(self) -> None:
        """Validate some batches before training, unless a validation has run or runs next."""
        dispatcher, reporter = self.dispatcher, self.dispatcher.reporter
        has_validated = reporter.validation_names is not None
        if has_validated or reporter.lacks_validation or dispatcher.stop_reason is not None:
            return
        request = ValidateRequest(
            call_number=-1,
            num_steps=_SANITY_STEPS,
            is_sanity_check=True,
            info=dict(self.arguments.info or {}),
        )
        try:
            # A worker without a batch has no metrics.
            metrics = [*filter(None, dispatcher.run(request, method="fit", has_batches=True))]
            # A few batches may not suffice for a metric.
            with contextlib.suppress(ValueError, RuntimeError, ArithmeticError, LookupError):
                metrics.append(merge_worker_metrics(metrics))
            if names := dict.fromkeys(itertools.chain.from_iterable(metrics)):
                why = f"a validation has: {', '.join(names)}."
                _check_monitored(self._monitored_metrics(), list(names), why)
            reporter.validation_names = {*names}
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
