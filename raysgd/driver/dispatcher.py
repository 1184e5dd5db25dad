"""The calls of a trainer to its workers, and their results."""

import itertools
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from raysgd._internal.files import append_lines
from raysgd._internal.nonfinite import nonfinite_loss
from raysgd._internal.progress import ReportedPosition
from raysgd._internal.runner import Request
from raysgd.callbacks.base import LastCall, Trainer, logdir_of
from raysgd.callbacks.callback_list import CallbackList
from raysgd.cluster.serialization import PackedValue
from raysgd.elastic.call import Call, LogPointCollector, WorkerPoint
from raysgd.elastic.controller import Controller
from raysgd.loop.requests import CallbackPause, LeavingMetricsRequest, TrainRequest, ValidateRequest
from raysgd.metrics import merge_workers, with_epoch

logger = logging.getLogger(__name__)

_MAX_FAILURES = 3
"""Number of losses that a call tolerates if it trains nothing and can be repeated."""


class CallResult(NamedTuple):
    """The result of a call of train or validate."""

    mergeable: list[dict[str, Any]]
    """Metrics with their weights by rank, then those of workers that have left."""
    merged: dict[str, Any]
    has_completed_epoch: bool
    last_call: LastCall
    has_trained: bool = True  # and not only ended an epoch that had no batch left

    @property
    def by_worker(self) -> list[dict[str, Any]]:
        return [merge_workers([each], raises=False) for each in self.mergeable]


@dataclass(eq=False)
class Dispatcher:
    """Runs the calls of one trainer.

    Methods take the trainer as an argument, because a reference would keep it alive.
    """

    controller: Controller
    callback_list: CallbackList
    trainer_name: str
    latest_metrics: dict[str, Any] = field(default_factory=dict)
    """The newest metrics of train and validate."""
    last_call: LastCall | None = None
    bad_steps: list[dict[str, Any]] = field(default_factory=list)
    """Steps that were not applied, oldest first."""
    _metrics_in_hook: dict[str, Any] = field(default_factory=dict)
    call_numbers: Iterator[int] = field(default_factory=itertools.count)
    """Workers recognize a repeated call by its number."""
    newest_train_request: TrainRequest | None = None
    _train_starts: dict[int, ReportedPosition] = field(default_factory=dict)
    """Where calls of train began, by their numbers. Another thread may begin one."""
    validation_offset: int = 0
    """Where the next validation begins, or the unfinished one began."""
    has_bad_loss: bool = False
    """Whether the newest metrics had a loss that is not finite."""
    _log_position: ReportedPosition | None = None
    """Where the workers were at the point that `on_log` receives."""

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
    def metrics(self) -> dict[str, Any]:
        """The newest metrics, including metrics that callbacks are handling now."""
        return {**self.latest_metrics, **self._metrics_in_hook}

    def report(self, hook: str, trainer: Trainer, metrics: dict[str, Any], call: LastCall) -> None:
        """Pass the metrics of a call to the callbacks, which may add metrics."""
        self.last_call = call
        before, self._metrics_in_hook = self._metrics_in_hook, metrics
        try:
            self.callback_list.call_hook(hook, trainer, metrics)
        finally:
            self._metrics_in_hook = before
            self.latest_metrics.update(metrics)

    def run(self, request: Request, changes_state: bool = False, **options: Any) -> list[Any]:
        """Run a call with these options of `Call`, and return the answers by rank."""
        self.check_open(changes_state)
        options = {"max_failures": _MAX_FAILURES, **options}
        call = Call(request=request, make_replay=self._make_replay, **options)
        return [outcome.unpack() for outcome in self.controller.run(call)]

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

    def train(
        self,
        trainer: Trainer,
        request: TrainRequest,
        num_steps: int | None,
        max_retries: int,
    ) -> CallResult:
        request = replace(request, ends_at_nan=self._ends_at_nan)
        call = Call(
            request=request,
            make_request=partial(self._make_train_request, request, num_steps),
            max_failures=max_retries,
            has_batches=True,
            can_pause=True,
            log_points=LogPointCollector(request.call_number, acknowledged_step=-1),
            leaving_metrics_request=LeavingMetricsRequest(call_number=request.call_number),
        )
        controller, seconds, is_paused = self.controller, 0.0, True
        try:
            while is_paused:
                call.on_progress = self.callback_list.notifier(trainer, "train")
                call.log_points.on_log = partial(self._log, trainer) if request.log_every else None
                started = time.perf_counter()
                results = [outcome.unpack() for outcome in controller.run(call)]
                seconds, ended = seconds + time.perf_counter() - started, time.time()
                is_paused = isinstance(results[0], CallbackPause)
                self.callback_list.notify_pause(trainer, at_end=not is_paused)
        finally:
            start = self._train_starts.pop(request.call_number, self.position)
            call.on_progress = call.log_points.on_log = None  # they keep the trainer alive
            self._report_bad_steps(trainer)
        position, speed = self.position, controller.speed.end_interval("train")
        results += [outcome.unpack() for outcome in call.leaving_outcomes]
        merged = with_epoch(trainer.epoch, self._merge(results))
        last_call = LastCall("train", ended, seconds, speed, position.epoch_samples)
        has_trained = any(results) or position.global_step > start.global_step or not start.in_epoch
        return CallResult(results, merged, position.epoch > start.epoch, last_call, has_trained)

    def _make_train_request(
        self, request: TrainRequest, num_steps: int | None, position: ReportedPosition, saves: bool
    ) -> TrainRequest:
        """Return the request with the goal of a call of ``train``, and the step of its next pause.

        `num_steps` is the number of steps to train. None means the rest of the epoch.
        """
        start = self._train_starts.setdefault(request.call_number, position)
        pause = self.callback_list.schedule_pause(position.global_step, saves)
        if num_steps is None:
            request = replace(request, until_epoch=start.epoch + 1)
        else:
            goals = (start.global_step + num_steps, request.until_step or sys.maxsize)
            request = replace(request, until_step=min(goals))
        request = replace(request, start_step=start.global_step, start_epoch=start.epoch)
        self.newest_train_request = replace(request, callback_pause_step=pause)
        return self.newest_train_request

    def _log(self, trainer: Trainer, points: Sequence[WorkerPoint]) -> None:
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
            self.callback_list.call_hook("on_log", trainer, call, metrics)
        finally:
            self._log_position = None

    def _report_bad_steps(self, trainer: Trainer) -> None:
        """Keep, write, and report the steps of a call that were not applied."""
        newest = max((each["step"] for each in self.bad_steps), default=0)
        bad_steps = self.controller.record.progress.updates.bad_steps
        if not (new_steps := [each for each in bad_steps if each["step"] > newest]):
            return
        self.bad_steps += new_steps
        if trainer.logdir is not None:
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

    def validate(self, trainer: Trainer, request: ValidateRequest, from_start: bool) -> CallResult:
        """Run a call of ``validate``.

        After a failed call, the next call begins at the same batch, or from the start.
        """
        start = self.validation_offset = 0 if from_start else self.validation_offset
        request = replace(request, offset=start)
        on_progress = self.callback_list.notifier(trainer, "validate")
        started = time.perf_counter()
        results = self.run(request, method="validate", has_batches=True, on_progress=on_progress)
        seconds = time.perf_counter() - started
        self.validation_offset = self.position.validation_offset
        is_complete = start == self.validation_offset == 0
        last_call = LastCall("validate", time.time(), seconds, is_complete=is_complete)
        return CallResult(results, self._merge(results), False, last_call)
