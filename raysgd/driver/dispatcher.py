"""The calls of a trainer to its workers, and the results that callbacks receive."""

import itertools
import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from raysgd._internal.arguments import as_dict, as_int, set_fields
from raysgd._internal.files import append_lines
from raysgd._internal.nonfinite import nonfinite_loss
from raysgd._internal.progress import ReportedPosition
from raysgd._internal.runner import Request
from raysgd.callbacks.base import LastCall, logdir_of
from raysgd.callbacks.callback_list import CallbackList
from raysgd.cluster.serialization import PackedValue
from raysgd.elastic.call import Call, LogPointCollector, WorkerPoint
from raysgd.elastic.controller import Controller
from raysgd.loop.requests import CallbackPause, LeavingMetricsRequest, TrainRequest, ValidateRequest
from raysgd.metrics import BATCH_COUNT, NUM_SAMPLES, merge_workers, with_epoch

logger = logging.getLogger(__name__)

_MAX_FAILURES = 3
"""Number of losses that a call tolerates if it trains nothing and can be repeated."""


@dataclass(frozen=True)
class FitArguments:
    """See :meth:`raysgd.TorchTrainer.fit`. The defaults mean that no ``fit()`` runs."""

    num_epochs: int | None = None
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


class CallResult(NamedTuple):
    """The result of a call of train or validate."""

    mergeable: list[dict[str, Any]]
    """Metrics with their weights by rank, then those of workers that have left."""
    merged: dict[str, Any]
    last_call: LastCall
    epoch: int | None = None
    """The epoch that was trained; None for validate."""

    @property
    def by_worker(self) -> list[dict[str, Any]]:
        results = [merge_workers([each], raises=False) for each in self.mergeable]
        return results if self.epoch is None else [with_epoch(self.epoch, each) for each in results]


@dataclass(eq=False)
class Dispatcher:
    """Runs the calls of one trainer, alone or in its ``fit()``.

    Callbacks receive the result of each call of train and validate, and for each epoch a result
    with the metrics of its training, and of the validation after it.
    """

    controller: Controller
    callback_list: CallbackList
    trainer_name: str
    call_numbers: Iterator[int] = field(default_factory=itertools.count)
    """Workers recognize a repeated call by its number."""
    newest_train_request: TrainRequest | None = None
    is_fitting: bool = False
    fit_arguments: FitArguments = field(default_factory=FitArguments)
    """The arguments of the running ``fit()``."""
    stop_reason: str | None = None
    """Why a callback stops ``fit()``."""
    latest_metrics: dict[str, Any] = field(default_factory=dict)
    """The newest metrics of train and validate."""
    last_call: LastCall | None = None
    bad_steps: list[dict[str, Any]] = field(default_factory=list)
    """Steps that were not applied, oldest first."""
    has_bad_loss: bool = False
    """Whether the newest metrics had a loss that is not finite."""
    validation_offset: int = 0
    """Where the next validation begins, or the unfinished one began."""
    validation_names: set[str] | None = None
    """Names of the metrics of validations. None: ``fit()`` tries one on a few batches."""
    _log_position: ReportedPosition | None = None
    """Where the workers were at the point that `on_log` receives."""
    _metrics_in_hook: dict[str, Any] = field(default_factory=dict)
    _train_starts: dict[int, ReportedPosition] = field(default_factory=dict)
    """Where calls of train began, by their numbers. Another thread may begin one."""
    _training: CallResult | None = None
    """The newest training, until it is reported with a validation."""
    _validation: CallResult | None = None
    """The first complete validation after this training."""
    _num_validated_epochs: int = 0
    """Number of epochs that need no validation anymore."""
    _due_step: int | None = None
    """Step at which a validation was missing when a ``fit()`` ended or a state was saved."""

    def check_open(self, changes_state: bool = False) -> None:
        """Check that the trainer may call its workers, and change the state if `changes_state`."""
        for hook in self.callback_list.running_hooks:
            is_in_call = hook in ("on_event", "on_progress", "on_log")
            if is_in_call or (hook == "on_pause" and changes_state):
                raise RuntimeError(
                    f"A callback cannot make this call in {hook}, during another call. Make it in "
                    "on_epoch_end. In on_pause, a callback can read and save the state."
                )
        if self.controller.is_shut_down:
            raise RuntimeError(
                f"This {self.trainer_name} is shut down, and its state is gone. Call save() or "
                "get_model() before shutdown(), and create a new trainer."
            )

    @property
    def position(self) -> ReportedPosition:
        """The position of the group, or in `on_log` that of the point."""
        return self._log_position or self.controller.record.position

    @property
    def epoch(self) -> int:
        """The current or just finished epoch, counted from 1. 0 before the first epoch."""
        return self.position.epoch + self.position.in_epoch

    @property
    def metrics(self) -> dict[str, Any]:
        """The newest metrics, including metrics that callbacks are handling now."""
        return {**self.latest_metrics, **self._metrics_in_hook}

    def run(self, request: Request, changes_state: bool = False, **options: Any) -> list[Any]:
        """Run a call with these options of `Call`, and return the answers by rank."""
        self.check_open(changes_state)
        options = {"max_failures": _MAX_FAILURES, **options}
        call = Call(request=request, make_replay=self._make_replay, **options)
        return self.controller.run(call)

    def _make_replay(self, position: ReportedPosition) -> Call | None:
        """Return the call that repeats training up to `position`."""
        if (newest := self.newest_train_request) is None:
            return None
        # Workers add the extra epochs of this call to its own goal.
        reached, goal = position.epoch + position.in_epoch, newest.until_epoch
        epoch = reached if reached <= (goal or newest.start_epoch) else goal
        request = replace(
            newest,
            until_epoch=epoch,
            until_step=None if epoch and not position.in_epoch else position.global_step,
            callback_pause_step=None,
            log_every=None,
            ends_at_nan=False,
        )
        return Call(request=request, has_batches=True, can_pause=True)

    # ---- train

    def train(self, num_steps: int | None, max_retries: int, **arguments: Any) -> CallResult:
        """Run a call of ``train`` with further arguments of its request.

        `num_steps` is the number of steps to train. None means the rest of the epoch.
        """
        seconds, is_paused = 0.0, True
        self.check_open(changes_state=True)
        with self.callback_list.within_call():
            request = TrainRequest(call_number=next(self.call_numbers), **arguments)
            number = request.call_number
            call = Call(
                request=request,
                make_request=partial(self._make_train_request, request, num_steps),
                max_failures=max_retries,
                has_batches=True,
                can_pause=True,
                log_points=LogPointCollector(number, acknowledged_step=-1),
                leaving_metrics_request=LeavingMetricsRequest(call_number=number),
            )
            if self.fit_arguments.log_every:
                call.log_points.on_log = self._log
            try:
                while is_paused:
                    on_progress = self.callback_list.notifier("train")
                    started = time.perf_counter()
                    results = self.controller.run(replace(call, on_progress=on_progress))
                    seconds, ended = seconds + time.perf_counter() - started, time.time()
                    is_paused = isinstance(results[0], CallbackPause)
                    self.callback_list.notify_pause(at_end=not is_paused)
            finally:
                start = self._train_starts.pop(number, self.position)
                self._report_bad_steps()
            speed = self.controller.speed.end_interval("train")
            results += [outcome.unpack() for outcome in call.history.leaving_outcomes]
            last_call = LastCall("train", ended, seconds, speed, self.position.epoch_samples)
            merged = with_epoch(self.epoch, self._merge(results))
            result = CallResult(results, merged, last_call, self.epoch)
            self._report_training(result, start)
        return result

    def _make_train_request(
        self, request: TrainRequest, num_steps: int | None, position: ReportedPosition, saves: bool
    ) -> TrainRequest:
        """Return the request with the goal of a call of ``train``, and the step of its next pause.

        The limits of a running ``fit()`` are goals, too.
        """
        start = self._train_starts.setdefault(request.call_number, position)
        until_step = self.fit_arguments.max_steps
        if num_steps is not None:
            until_step = min(start.global_step + num_steps, until_step or sys.maxsize)
        self.newest_train_request = replace(
            request,
            until_epoch=start.epoch + 1 if num_steps is None else None,
            until_step=until_step,
            adds_epoch=not self.is_fitting,
            start_step=start.global_step,
            start_epoch=start.epoch,
            callback_pause_step=self.callback_list.schedule_pause(position.global_step, saves),
            log_every=self.fit_arguments.log_every,
            ends_at_nan=self._ends_at_nan,
        )
        return self.newest_train_request

    def _log(self, points: Sequence[WorkerPoint]) -> None:
        """Pass the metrics of a point to callbacks."""
        if not (packed := [point.metrics for _, point in points if point.metrics is not None]):
            return
        newest, timing = points[-1][1], dict(points)
        members = [member for member in self.controller.members if member in timing]
        speed = self.controller.speed.end_interval("step", {m: timing[m].timing for m in members})
        call = LastCall("step", time.time(), max(point.seconds for _, point in points), speed)
        self._log_position = ReportedPosition(epoch=newest.epoch, global_step=newest.global_step)
        try:
            measured = [each.unpack() if isinstance(each, PackedValue) else each for each in packed]
            merged = self._merge(measured, raises=False)  # a few steps may not suffice
            metrics = {name: each for name, each in merged.items() if not name.startswith("last_")}
            self.callback_list.call_hook("on_log", call, metrics)
        finally:
            self._log_position = None

    def _report_bad_steps(self) -> None:
        """Keep, write, and report the steps of a call that were not applied."""
        newest = max((each["step"] for each in self.bad_steps), default=0)
        bad_steps = self.controller.record.progress.updates.bad_steps
        if not (new_steps := [each for each in bad_steps if each["step"] > newest]):
            return
        self.bad_steps += new_steps
        if (trainer := self.callback_list.trainer).logdir is not None:
            append_lines(logdir_of(trainer) / "bad_steps.jsonl", new_steps)
        logger.warning(
            "Bad steps that were not applied: %(number)d. The newest is step %(step)d, because "
            "%(reason)s. trainer.bad_steps has their samples.",
            {"number": len(new_steps), **new_steps[-1]},
        )

    def _merge(self, results: list[Any], raises: bool = True) -> dict[str, Any]:
        """Return the merged metrics, and warn once of a loss that is not finite."""
        merged = merge_workers(results, raises)
        if (bad := nonfinite_loss(merged)) and not (self.has_bad_loss or self._ends_at_nan):
            logger.warning(
                "%s by step %d. The weights may be lost. callbacks=[TerminateOnNaN()] stops at "
                "the first such step. A CheckpointCallback keeps the last finite state.",
                bad,
                self.position.global_step,
            )
        self.has_bad_loss = bool(bad)
        return merged

    @property
    def _ends_at_nan(self) -> bool:
        return any(callback.stops_at_nan for callback in self.callback_list)

    # ---- validate

    def validate(
        self,
        info: Mapping[str, Any] | None,
        num_steps: int | None = None,
        profile: bool = False,
        from_start: bool = False,
    ) -> CallResult:
        """Run a call of ``validate``.

        After a failed call, the next call begins at the same batch, or from the start.
        """
        if num_steps is not None:
            num_steps = as_int("validate", "num_steps", num_steps, 1)
        info = as_dict("validate", "info", info)
        self.check_open(changes_state=True)
        with self.callback_list.within_call():
            start = self.validation_offset = 0 if from_start else self.validation_offset
            request = ValidateRequest(
                call_number=next(self.call_numbers),
                num_steps=num_steps,
                offset=start,
                info=info,
                profile=profile,
            )
            on_progress = self.callback_list.notifier("validate")
            started = time.perf_counter()
            results = self.run(request, has_batches=True, on_progress=on_progress)
            seconds = time.perf_counter() - started
            self.validation_offset = self.position.validation_offset
            is_complete = start == self.validation_offset == 0
            last_call = LastCall("validate", time.time(), seconds, is_complete=is_complete)
            result = CallResult(results, self._merge(results), last_call)
            self._report_validation(result)
        return result

    # ---- results

    def _report(self, hook: str, result: CallResult) -> None:
        """Pass the metrics of a call to the callbacks, which may add metrics."""
        self.last_call, metrics = result.last_call, result.merged
        before, self._metrics_in_hook = self._metrics_in_hook, metrics
        try:
            self.callback_list.call_hook(hook, metrics)
        finally:
            self._metrics_in_hook = before
            self.latest_metrics.update(metrics)

    def _report_training(self, result: CallResult, start: ReportedPosition) -> None:
        has_steps = any(result.mergeable) or self.position.global_step > start.global_step
        if start.in_epoch and not has_steps:  # the epoch had no batch left, and has only ended
            return self.restore_due_validation({})
        self._training, self._validation = result, None
        has_completed_epoch = self.position.epoch > start.epoch
        try:
            self._report("on_epoch_end" if has_completed_epoch else "on_steps_end", result)
        finally:  # also after Ctrl-C in a callback
            if has_completed_epoch and not self.is_validation_due:
                self._report_epoch()
        self.callback_list.notify_pause()  # of those that save

    def _report_validation(self, result: CallResult) -> None:
        is_complete = result.last_call.is_complete
        if is_complete and self._training is not None:
            self._validation = result
        try:
            self._report("on_validation_end", result)
        finally:  # also after Ctrl-C in a callback
            self.validation_names = {*(self.validation_names or ()), *result.merged}
            if is_complete:  # after the hook, because a state it saves lacks `on_result`
                self._due_step, self._num_validated_epochs = None, self.position.epoch
            if self._validation is not None:
                self._report_epoch()

    def _report_epoch(self) -> None:
        """Pass the result of an epoch to callbacks, unless one made the call or loaded a state."""
        training, validation = self._training, self._validation
        if self.callback_list.running_hooks or training is None:
            return
        metrics, call = training.merged, training.last_call
        if validation is None:
            names = (self.validation_names or set()) - {NUM_SAMPLES, BATCH_COUNT}
            metrics = {name: value for name, value in metrics.items() if name not in names}
        else:
            metrics = {**metrics, **validation.merged}
            seconds = call.seconds + validation.last_call.seconds
            call = validation.last_call._replace(seconds=seconds)
            self._training = self._validation = None
        self.callback_list.call_hook("on_result", call, metrics)

    # ---- missing validations

    @contextmanager
    def within_fit(self, arguments: FitArguments) -> Iterator[None]:
        self.is_fitting, self.fit_arguments = True, arguments
        self._num_validated_epochs = self.position.epoch
        try:
            yield
        finally:
            step = self.position.global_step
            self._due_step = step if self.lacks_validation else None
            self.is_fitting, self.fit_arguments = False, FitArguments()

    @property
    def has_all_epochs(self) -> bool:
        """Whether the number of epochs of the running ``fit()`` is reached."""
        return self.position.epoch >= (self.fit_arguments.num_epochs or math.inf)

    @property
    def is_validation_due(self) -> bool:
        """Whether ``fit()`` validates after the newest completed epoch."""
        every, done = self.fit_arguments.validate_every, self.position.epoch
        return bool(every and (done % every == 0 or self.has_all_epochs))

    @property
    def lacks_validation(self) -> bool:
        """Whether the validation of the newest epoch is missing, and no training followed."""
        if self._due_step == self.position.global_step:
            return True
        return self.position.epoch > self._num_validated_epochs and self.is_validation_due

    def restore_due_validation(self, due: dict[str, Any] | None) -> None:
        """Record the metrics of the loaded epoch if its validation is missing, otherwise None."""
        self._due_step = None if due is None else self.position.global_step
        self._num_validated_epochs = self.position.epoch
        call = LastCall("train", time.time(), 0.0)
        self._training = None if due is None else CallResult([], due, call)
        self._validation = None
