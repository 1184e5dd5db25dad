"""The calls of a trainer to its workers, and their results."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from raysgd._internal.context import Progress
from raysgd.callbacks.base import LastCall, Trainer
from raysgd.callbacks.callback_list import CallbackList
from raysgd.data import Dataset
from raysgd.elastic.call import Call, LoadRequest
from raysgd.elastic.controller import Controller
from raysgd.elastic.machine import Closed
from raysgd.loop.requests import MeasuredRequest, TrainRequest, ValidateRequest
from raysgd.metrics import merge_workers


class WorkerMetrics(NamedTuple):
    """The result of a call of train or validate."""

    by_worker: list[dict[str, Any]]
    merged: dict[str, Any]
    completed_epoch: bool
    call: LastCall


@dataclass(kw_only=True)
class TrainCall(Call):
    """A call of ``train``. Pauses of callbacks split it into parts, which share their metrics."""

    request: TrainRequest
    num_steps: int | None
    """Number of steps to train. None means the rest of the epoch."""
    next_pause: Callable[[int, bool], int | None]
    """Returns the next pause step. Arguments: the committed steps, and `immediately`."""
    has_batches: bool = True
    can_pause: bool = True
    start: Progress | None = None
    seconds: float = 0.0
    logged_s: float = 0.0
    """Value of `seconds` at the last logged step."""

    def __post_init__(self) -> None:
        self.farewell = MeasuredRequest(call=self.request.call)

    def begin(self, progress: Progress) -> None:
        """Set the absolute goal of the call, and the step of its next pause."""
        request, step = self.request, progress.global_step
        if self.start is None:
            self.start = progress
            logged = None if request.logged is None else step
            request = replace(request, start_step=step, logged=logged)
            if self.num_steps is None:
                request = replace(request, until_epoch=progress.epoch + 1)
            else:
                goals = (step + self.num_steps, request.until_step or sys.maxsize)
                request = replace(request, until_step=min(goals))
        self.request = replace(request, callback_pause=self.next_pause(step, self.immediately))
        self.immediately = False


@dataclass(eq=False)
class Dispatcher:
    """Runs the calls of one trainer.

    Methods take the trainer as an argument, because a reference would keep it alive.
    """

    controller: Controller
    callback_list: CallbackList
    trainer_name: str
    latest: dict[str, Any] = field(default_factory=dict)
    """The newest metrics of train and validate."""
    last_call: LastCall | None = None
    max_steps: int | None = None
    """Argument of the running ``fit()``, as `log_every`."""
    log_every: int | None = None
    _shown: dict[str, Any] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    """The numbers of calls. Workers recognize a repeated call by its number."""
    _newest: TrainCall | None = None
    _failed_validation: int | None = None

    def check_open(self, moves: bool = False) -> None:
        """Check that the trainer may call its workers now and, if `moves`, change the state."""
        for hook in self.callback_list.inside:
            if hook in ("on_event", "on_progress"):
                raise RuntimeError(
                    f"A callback cannot call the workers in {hook}, during another call. Make the "
                    "call in on_epoch_end."
                )
            if hook in ("on_pause", "on_log") and moves:
                raise RuntimeError(
                    f"A callback cannot train, validate, or load in {hook}, during train(). It can "
                    "read and save the state."
                )
        if isinstance(self.controller.state, Closed):
            raise RuntimeError(
                f"This {self.trainer_name} is shut down, and its state is gone. Call save() or "
                "get_model() before shutdown(), and create a new trainer."
            )

    @property
    def metrics(self) -> dict[str, Any]:
        """The newest metrics, including metrics that callbacks are handling now."""
        return {**self.latest, **self._shown}

    def show(self, hook: str, trainer: Trainer, metrics: dict[str, Any], call: LastCall) -> None:
        """Pass the metrics of a call to the callbacks, which may add metrics."""
        self.last_call = call
        before, self._shown = self._shown, metrics
        try:
            self.callback_list.call(hook, trainer, metrics)
        finally:
            self._shown = before
            self.latest.update(metrics)

    def make(self, call: Call, moves: bool = False) -> list[Any]:
        """Run a call, and return the answers by rank."""
        self.check_open(moves)
        if not isinstance(call.request, LoadRequest):
            call.replay = self._replay_of
        return [outcome.value() for outcome in self.controller.run(call)]

    def _replay_of(self, reached: Progress) -> Call | None:
        """Return the call that repeats training up to `reached`."""
        if self._newest is None:
            return None
        request = replace(
            self._newest.request,
            until_epoch=None if reached.in_epoch else reached.epoch,
            until_step=reached.global_step if reached.in_epoch else None,
            callback_pause=None,
        )
        return Call(request=request, has_batches=True, can_pause=True)

    def train(
        self,
        trainer: Trainer,
        num_steps: int | None,
        max_retries: int,
        *,
        profile: bool,
        info: Mapping[str, Any] | None,
        dataset: Dataset | None,
    ) -> WorkerMetrics:
        request = TrainRequest(
            call=next(self.numbers),
            until_step=self.max_steps,
            logged=None if self.log_every is None else 0,  # `begin` sets the step
            info=dict(info or {}),
            profile=profile,
            dataset=dataset,
        )
        call = TrainCall(
            request=request,
            num_steps=num_steps,
            next_pause=self._next_pause,
            max_losses=max_retries,
        )
        controller = self.controller
        self._newest = call
        ended = 0.0
        results: list[Any] = [None]
        while results[0] is None:
            call.request = replace(call.request, info=dict(info or {}))
            call.on_wait = self.callback_list.watcher(trainer, "train")
            started = time.perf_counter()
            results = [outcome.value() for outcome in controller.run(call)]
            call.seconds, ended = call.seconds + time.perf_counter() - started, time.time()
            self._log(trainer, call)
            self.callback_list.pause(trainer)
        assert call.start is not None
        completed = controller.progress.epoch > call.start.epoch
        results += [outcome.value() for outcome in call.departed_results]
        merged = merge_workers(results)
        last_call = LastCall("train", ended, call.seconds, controller.speed.lap("train"))
        return WorkerMetrics(results, merged, completed, last_call)

    def _log(self, trainer: Trainer, call: TrainCall) -> None:
        """Pass the metrics since the last logged step to callbacks, if logging is due.

        Steps that a restart repeats are not logged again.
        """
        since = call.request.logged
        if self.log_every is None or since is None:
            return
        step = self.controller.progress.global_step
        if step < _next_multiple(self.log_every, since):
            return
        call.request = replace(call.request, logged=step)
        request = MeasuredRequest(call=call.request.call, since=since)
        parts = self.make(Call(request=request, method="train", max_losses=3))
        merged = merge_workers([each for each in parts if each is not None])
        metrics = {name: each for name, each in merged.items() if not name.startswith("last_")}
        speed = self.controller.speed.lap("step")
        point = LastCall("step", time.time(), call.seconds - call.logged_s, speed)
        call.logged_s = call.seconds
        self.callback_list.call("on_log", trainer, point, metrics)

    def _next_pause(self, global_step: int, immediately: bool) -> int | None:
        steps = (
            self.callback_list.next_pause(global_step, immediately),
            None if self.log_every is None else _next_multiple(self.log_every, global_step),
        )
        return min((step for step in steps if step is not None), default=None)

    def validate(
        self,
        trainer: Trainer,
        num_steps: int | None,
        *,
        profile: bool,
        info: Mapping[str, Any] | None,
        from_start: bool = False,
    ) -> WorkerMetrics:
        """Run a call of ``validate``.

        After a failed call, the next call begins at the same batch. With `from_start`, begin with
        the first batch.
        """
        number = None if from_start else self._failed_validation
        self._failed_validation = number = next(self.numbers) if number is None else number
        request = ValidateRequest(
            call=number,
            num_steps=num_steps,
            from_start=from_start,
            info=dict(info or {}),
            profile=profile,
        )
        call = Call(
            request=request,
            method="validate",
            max_losses=3,
            has_batches=True,
            on_wait=self.callback_list.watcher(trainer, "validate"),
        )
        started = time.perf_counter()
        results = self.make(call)
        seconds = time.perf_counter() - started
        self._failed_validation = None
        merged = merge_workers(results)
        return WorkerMetrics(results, merged, False, LastCall("validate", time.time(), seconds))


def _next_multiple(number: int, step: int) -> int:
    return (step // number + 1) * number
