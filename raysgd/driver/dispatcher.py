"""The calls of a trainer to its workers."""

import itertools
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from raysgd._internal.arguments import as_dict, as_int
from raysgd._internal.runner import Request
from raysgd._internal.worker_status import ReportedPosition
from raysgd.callbacks.base import CallInfo
from raysgd.callbacks.callback_list import CallbackList
from raysgd.driver.result_reporter import MergedResult, ResultReporter
from raysgd.elastic.call import Call, LogPointCollector
from raysgd.elastic.controller import Controller
from raysgd.loop.requests import CallbackPause, LeavingMetricsRequest, TrainRequest, ValidateRequest

_MAX_RETRIES = 3
"""Number of retries of a call that trains nothing and can be repeated."""


@dataclass(eq=False)
class Dispatcher:
    """Runs the calls of one trainer, alone or in its ``fit()``."""

    controller: Controller
    callback_list: CallbackList
    trainer_name: str
    reporter: ResultReporter
    call_numbers: Iterator[int] = field(default_factory=itertools.count)
    """Workers recognize a repeated call by its number."""
    newest_train_request: TrainRequest | None = None
    stop_reason: str | None = None
    """Why a callback stops ``fit()``."""
    _train_starts: dict[int, ReportedPosition] = field(default_factory=dict)
    """Where calls of train began, by their numbers. Another thread may begin one."""
    _training: Call | None = None
    """The call of train that runs, or that pauses for other calls of callbacks."""

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

    def run(self, request: Request, changes_state: bool = False, **options: Any) -> list[Any]:
        """Run a call with these options of `Call`, and return the answers by rank."""
        self.check_open(changes_state)
        options = {"max_retries": _MAX_RETRIES, **options}
        if (training := self._training) is not None:  # a worker may leave during this call
            options["leaving_metrics_request"] = training.leaving_metrics_request
            options["leaving_outcomes"] = training.leaving_outcomes
        call = Call(request=request, make_replay=self._make_replay, **options)
        return self.controller.run(call)

    def _make_replay(self, position: ReportedPosition) -> Call | None:
        """Return the call that repeats training up to `position`."""
        if (newest := self.newest_train_request) is None:
            return None
        # Workers add the extra epochs of this call to its own goal.
        reached, goal = position.num_completed_epochs + position.in_epoch, newest.until_epoch
        epoch = reached if reached <= (goal or newest.start_epoch) else goal
        request = replace(
            newest,
            until_epoch=epoch,
            until_step=None if epoch and not position.in_epoch else position.global_step,
            callback_pause_step=None,
            log_every=None,
            ends_at_nonfinite_loss=False,
        )
        return Call(request=request, has_batches=True, can_pause=True)

    # ---- train

    def train(self, num_steps: int | None, max_retries: int, **arguments: Any) -> MergedResult:
        """Run a call of ``train`` with further arguments of its request.

        `num_steps` is the number of steps to train. None means the rest of the epoch.
        """
        seconds, is_paused, reporter = 0.0, True, self.reporter
        self.check_open(changes_state=True)
        with self.callback_list.within_call():
            request = TrainRequest(call_number=next(self.call_numbers), **arguments)
            number = request.call_number
            on_log = reporter.report_points if reporter.fit_arguments.log_every else None
            call = Call(
                request=request,
                make_request=partial(self._make_train_request, request, num_steps),
                max_retries=max_retries,
                has_batches=True,
                can_pause=True,
                leaving_metrics_request=LeavingMetricsRequest(call_number=number),
                log_points=LogPointCollector(number, on_log, acknowledged_step=-1),
            )
            self._training = call
            try:
                while is_paused:
                    on_progress = self.callback_list.notifier("train")
                    started = time.perf_counter()
                    answers = self.controller.run(replace(call, on_progress=on_progress))
                    seconds, ended = seconds + time.perf_counter() - started, time.time()
                    is_paused = isinstance(answers[0], CallbackPause)
                    self.callback_list.notify_pause(at_end=not is_paused)
            finally:
                self._training = None
                start = self._train_starts.pop(number, reporter.position)
                reporter.report_bad_steps()
            speed = self.controller.speed.end_interval("train")
            answers += [outcome.unpack() for outcome in call.leaving_outcomes]
            last_call = CallInfo("train", ended, seconds, speed, reporter.position.epoch_samples)
            return reporter.report_training(answers, last_call, start)

    def _make_train_request(
        self, request: TrainRequest, num_steps: int | None, position: ReportedPosition, saves: bool
    ) -> TrainRequest:
        """Return the request with the goal of a call of ``train``, and the step of its next pause.

        The limits of a running ``fit()`` are goals, too.
        """
        start = self._train_starts.setdefault(request.call_number, position)
        fit_arguments = self.reporter.fit_arguments
        until_step = fit_arguments.max_steps
        if num_steps is not None:
            until_step = min(start.global_step + num_steps, until_step or sys.maxsize)
        self.newest_train_request = replace(
            request,
            until_epoch=start.num_completed_epochs + 1 if num_steps is None else None,
            until_step=until_step,
            adds_epoch=not self.reporter.is_fitting,
            start_step=start.global_step,
            start_epoch=start.num_completed_epochs,
            callback_pause_step=self.callback_list.schedule_pause(position.global_step, saves),
            log_every=fit_arguments.log_every,
            ends_at_nonfinite_loss=any(callback.stops_at_nan for callback in self.callback_list),
        )
        return self.newest_train_request

    # ---- validate

    def validate(
        self,
        info: Mapping[str, Any] | None,
        num_steps: int | None = None,
        profile: bool = False,
        from_start: bool = False,
    ) -> MergedResult:
        """Run a call of ``validate``.

        After a failed call, the next call begins at the same batch, or from the start.
        """
        if num_steps is not None:
            num_steps = as_int("validate", "num_steps", num_steps, 1)
        info = as_dict("validate", "info", info)
        self.check_open(changes_state=True)
        with self.callback_list.within_call():
            reporter = self.reporter
            start = reporter.validation_offset = 0 if from_start else reporter.validation_offset
            request = ValidateRequest(
                call_number=next(self.call_numbers),
                num_steps=num_steps,
                offset=start,
                info=info,
                profile=profile,
            )
            on_progress = self.callback_list.notifier("validate")
            started = time.perf_counter()
            answers = self.run(request, has_batches=True, on_progress=on_progress)
            seconds = time.perf_counter() - started
            reporter.validation_offset = reporter.position.validation_offset
            is_complete = start == reporter.validation_offset == 0
            last_call = CallInfo("validate", time.time(), seconds, is_complete=is_complete)
            return reporter.report_validation(answers, last_call)
