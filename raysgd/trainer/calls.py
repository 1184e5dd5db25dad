"""The trainer's calls to its workers, as callbacks see them: parts, pauses, losses, seconds."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from raysgd._internal.context import Progress
from raysgd.callbacks.base import LastCall, Trainer
from raysgd.callbacks.callback_list import CallbackList
from raysgd.cluster.worker_handle import WorkerHandle
from raysgd.data import Dataset
from raysgd.elastic.call import Call
from raysgd.elastic.controller import Controller
from raysgd.elastic.requests import LoadRequest
from raysgd.loop.requests import MeasuredRequest, TrainRequest, ValidateRequest
from raysgd.metrics import NUM_SAMPLES, Computed, merge_workers
from raysgd.trainer.fit import Limits

__all__ = ["CallResult", "Calls", "TrainCall"]

logger = logging.getLogger(__name__)


class CallResult(NamedTuple):
    """What came of a call of train or validate."""

    by_worker: list[dict[str, Any]]
    """What each worker measured."""
    merged: dict[str, Any]
    """The same over all workers."""
    completed_epoch: bool
    call: LastCall


class TrainCall(Call):
    """A call of ``train``, in as many parts as callbacks want to pause in it.

    To the workers the parts are one call, of which they merge what they have measured.

    Args:
        request: the first request; `begin` adds its goal.
        num_steps: steps to train; None: to the end of the epoch under way.
        next_pause: returns the step at which to pause next, from how many are done, and whether
            that shall be at once.
        options: of `Call`.
    """

    request: TrainRequest

    def __init__(
        self,
        request: TrainRequest,
        num_steps: int | None,
        next_pause: Callable[[int, bool], int | None],
        max_losses: float = 0,
    ) -> None:
        super().__init__(
            request=request,
            has_batches=True,
            can_pause=True,
            farewell=MeasuredRequest(call=request.call),
            max_losses=max_losses,
        )
        self._num_steps = num_steps
        self._next_pause = next_pause
        self.start: Progress | None = None
        """How far training was as it began."""
        self.seconds = 0.0
        """How long its parts have taken."""
        self.logged_s = 0.0
        """The same until the step that its metrics are logged up to."""

    def begin(self, members: Sequence[WorkerHandle], progress: Progress) -> None:
        """Set the goal, in absolute terms, and where the part under way pauses."""
        super().begin(members, progress)
        request, step = self.request, progress.global_step
        if self.start is None:
            self.start = progress
            logged = None if request.logged is None else step
            request = replace(request, start_step=step, logged=logged)
            if self._num_steps is None:
                request = replace(request, until_epoch=progress.epoch + 1)
            else:
                request = replace(request, until_step=step + self._num_steps)
        self.request = replace(request, callback_pause=self._next_pause(step, self.at_once))
        self.at_once = False

    def end_at(self, global_step: int) -> None:
        """Let it have reached its goal at a step that is done."""
        self.request = replace(self.request, until_step=global_step)


class Calls:
    """Makes calls on the workers of a controller.

    The trainer is handed in with each call, since what refers to it here would keep it from being
    collected.
    """

    def __init__(self, controller: Controller, callback_list: CallbackList) -> None:
        self._controller = controller
        self._callback_list = callback_list
        self._numbers = itertools.count()
        self._paused: TrainCall | None = None
        self._newest: TrainCall | None = None
        self._has_checked_counts = False
        self._failed_validation: int | None = None
        self._limits = Limits()
        self._log_every: int | None = None

    @contextlib.contextmanager
    def limited(self, limits: Limits, log_every: int | None = None) -> Iterator[None]:
        """Hold to the limits of a ``fit()`` while it runs, and log by the step."""
        self._limits, self._log_every = limits, log_every
        try:
            yield
        finally:
            self._limits, self._log_every = Limits(), None

    def next_number(self) -> int:
        """Return a number by which workers know a call that is made again."""
        return next(self._numbers)

    def make(self, call: Call, own: bool = True) -> list[Any]:
        """Make a call, and return what the method returned, by rank.

        Args:
            call: what to call.
            own: whether the caller may write to tensors and arrays in what is returned.
        """
        if self._paused is not None:  # a worker that is lost now takes what it has measured with it
            call.metrics_start_step = dict(self._paused.metrics_start_step)
        if not isinstance(call.request, LoadRequest):
            call.catch_up = self._catch_up
        return [outcome.value(own) for outcome in self._controller.run(call)]

    def _catch_up(self, reached: Progress) -> Call | None:
        """Return the newest call of train up to where training was, to be made again."""
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
    ) -> CallResult:
        """Make one call of train."""
        request = TrainRequest(
            call=self.next_number(),
            until_step=self._limits.max_steps,
            limit=self._limits.train_batches,
            repeats=self._limits.repeats,
            logged=None if self._log_every is None else 0,  # `begin` sets it
            profile=profile,
            dataset=dataset,
        )
        call = TrainCall(request, num_steps, self._next_pause, max_retries)
        controller, self._newest = self._controller, call
        num_lost_paused, ended = 0, 0.0
        results: list[Any] = [None]
        while results[0] is None:
            call.request = replace(call.request, info=dict(info or {}))
            call.on_wait = self._callback_list.watcher(trainer, "train")
            started = time.perf_counter()
            results = [outcome.value() for outcome in controller.run(call)]
            call.seconds, ended = call.seconds + time.perf_counter() - started, time.time()
            num_events = len(controller.events)
            self._paused = call if results[0] is None else None
            try:
                self._log(trainer, call)
                self._callback_list.pause(trainer)
            finally:
                self._paused = None
            if self._limits.reached(controller.progress.global_step):
                call.end_at(controller.progress.global_step)
            num_lost_paused += sum(e.kind == "lost" for e in controller.events[num_events:])
        assert call.start is not None
        completed = controller.progress.epoch > call.start.epoch
        # what was measured may be lost in these
        num_breaks = call.num_losses + num_lost_paused + call.num_splits + call.num_missing
        results += [outcome.value() for outcome in call.departed_results]
        merged = self._merged("train", results, num_breaks > 0)
        return CallResult(results, merged, completed, LastCall("train", ended, call.seconds))

    def _log(self, trainer: Trainer, call: TrainCall) -> None:
        """Tell callbacks what was measured since they were last told, if it is time to.

        Steps that are done again, after a restart, are not told of again.
        """
        since = call.request.logged
        if self._log_every is None or since is None:
            return
        step = self._controller.progress.global_step
        if step < _next_multiple(self._log_every, since):
            return
        call.request = replace(call.request, logged=step)
        request = MeasuredRequest(call=call.request.call, since=since)
        found = self.make(Call(request=request, max_losses=3))
        merged = merge_workers([each for each in found if each is not None])
        metrics = {name: each for name, each in merged.items() if not name.startswith("last_")}
        point = LastCall("step", time.time(), call.seconds - call.logged_s)
        call.logged_s = call.seconds
        self._callback_list.call("on_log", trainer, point, metrics)

    def _next_pause(self, global_step: int, at_once: bool) -> int | None:
        """Return the next step at which somebody on the driver wants to look."""
        steps = (
            self._callback_list.next_pause(global_step, at_once),
            self._limits.next_look(global_step),
            None if self._log_every is None else _next_multiple(self._log_every, global_step),
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
        loader: Any = None,
    ) -> CallResult:
        """Make one call of validate; after one that failed it is the same call to the workers.

        So it begins where that one did, also on workers on which all had gone well.

        Args:
            trainer: that makes the call.
            num_steps: steps to validate; None: to the end of the loader.
            profile: whether to measure.
            info: for the operator.
            from_start: begin with the first batch, wherever the call before has stopped.
            loader: what to evaluate in place of the validation loader; no callback sees it.
        """
        number = None if from_start else self._failed_validation
        if number is None:
            number = self.next_number()
        if loader is None:
            self._failed_validation = number
        request = ValidateRequest(
            call=number,
            num_steps=num_steps,
            from_start=from_start,
            loader=loader,
            limit=self._limits.val_batches if loader is None else None,
            info=dict(info or {}),
            profile=profile,
        )
        call = Call(
            request=request,
            max_losses=3,
            has_batches=True,
            on_wait=self._callback_list.watcher(trainer, "validate") if loader is None else None,
        )
        started = time.perf_counter()
        results = self.make(call)
        seconds = time.perf_counter() - started
        if loader is None:
            self._failed_validation = None
        merged = self._merged("validate", results, call.num_losses > 0)
        return CallResult(results, merged, False, LastCall("validate", time.time(), seconds))

    def _merged(
        self, method: str, results: Sequence[Mapping[str, Any]], lost: bool
    ) -> dict[str, Any]:
        merged = merge_workers(results)
        covered = self._controller.progress.num_covered
        if method == "validate" and not self._has_checked_counts and len(results) > 1:
            self._has_checked_counts = True
            if _counts_batches(results):
                logger.warning(
                    "validate() of the operator returns no %r, so that each worker counts by its "
                    "batches, however many samples these have: its means are not exact then. "
                    "Return it beside them.",
                    NUM_SAMPLES,
                )
        if lost and covered is not None and NUM_SAMPLES in merged:
            # the steps are done, though what a lost worker measured of them is gone with it
            merged[NUM_SAMPLES] = covered
        return merged


def _next_multiple(number: int, step: int) -> int:
    return (step // number + 1) * number


def _counts_batches(results: Sequence[Mapping[str, Any]]) -> bool:
    """Whether workers have measured different means without saying of how many samples."""
    first, *others = results
    means = {
        name: mean
        for name, mean in first.items()
        if isinstance(mean, float) and not isinstance(mean, Computed)
    }
    differ = any(other.get(name) != mean for name, mean in means.items() for other in others)
    return NUM_SAMPLES not in first and differ
