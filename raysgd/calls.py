"""The trainer's calls to its workers, as callbacks see them: parts, pauses, losses, seconds."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from raysgd.callbacks.base import LastCall, Trainer
from raysgd.callbacks.callback_list import CallbackList
from raysgd.cluster.controller import Controller
from raysgd.context import Progress
from raysgd.data import Dataset
from raysgd.metrics import NUM_SAMPLES, Computed, merge_workers

__all__ = ["CallResult", "Calls"]

logger = logging.getLogger(__name__)


class CallResult(NamedTuple):
    """What came of a call of train or validate."""

    by_worker: list[dict[str, Any]]
    """What each worker measured."""
    merged: dict[str, Any]
    """The same over all workers."""
    completed_epoch: bool
    call: LastCall


class Calls:
    """Makes calls on the workers of a controller.

    The trainer is handed in with each call, since what refers to it here would keep it from being
    collected.
    """

    def __init__(self, controller: Controller, callback_list: CallbackList) -> None:
        self._controller = controller
        self._callback_list = callback_list
        self._numbers = itertools.count()
        self._metrics_start_step: dict[Any, int] | None = None
        self._looked_at: set[str] = set()
        self._failed_validation: int | None = None

    def make(self, method: str, *, own: bool = True, **arguments: Any) -> list[Any]:
        """Call a method of the runner, and return what it returned, by rank.

        Args:
            method: name of the method.
            own: whether the caller may write to tensors and arrays in it.
            arguments: those of `Controller.call`.
        """
        outcomes = self._controller.call(
            method, metrics_start_step=self._metrics_start_step, **arguments
        )
        return [outcome.value(own) for outcome in outcomes]

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
        """Make one call of train, in as many parts as callbacks want to pause in it.

        To the workers the parts are one call, of which they merge what they have measured.
        """
        begun: list[Progress] = []

        def goal(reached: Progress) -> dict[str, Any]:
            # in absolute terms, so that the call can be repeated after a loss or a pause
            begun.append(reached)
            target = (
                {"until_epoch": begun[0].epoch + 1}
                if num_steps is None
                else {"until_step": begun[0].global_step + num_steps}
            )
            return {**target, "stop_at": self._callback_list.next_pause(reached.global_step)}

        controller, number = self._controller, next(self._numbers)
        losses: tuple[int, list[str]] = (0, [])
        num_lost_paused = 0
        total_s = ended = 0.0
        results: list[Any] = [None]
        try:
            while results[0] is None:
                results, seconds = self._timed(
                    trainer,
                    "train",
                    max_losses=max_retries,
                    losses_before=losses,
                    call=number,
                    profile=profile,
                    info=dict(info or {}),
                    dataset=dataset,
                    arguments_from=goal,
                )
                losses = controller.losses_in_call, controller.causes_in_call
                total_s, ended = total_s + seconds, time.time()
                if results[0] is None:
                    # what a worker has measured so far would be lost with it in the pause, too
                    self._metrics_start_step = dict(controller.metrics_start_step)
                num_events = len(controller.events)
                self._callback_list.pause(trainer)
                num_lost_paused += sum(e.kind == "lost" for e in controller.events[num_events:])
        finally:
            self._metrics_start_step = None
        completed = controller.progress.epoch > begun[0].epoch
        merged = self._merged("train", results, losses[0] + num_lost_paused > 0)
        return CallResult(results, merged, completed, LastCall("train", ended, total_s))

    def validate(
        self,
        trainer: Trainer,
        num_steps: int | None,
        *,
        profile: bool,
        info: Mapping[str, Any] | None,
    ) -> CallResult:
        """Make one call of validate; after one that failed it is the same call to the workers.

        So it begins where that one did, also on workers on which all had gone well.
        """
        number = self._failed_validation
        if number is None:
            number = self._failed_validation = next(self._numbers)
        results, seconds = self._timed(
            trainer,
            "validate",
            max_losses=3,
            call=number,
            profile=profile,
            info=dict(info or {}),
            num_steps=num_steps,
        )
        self._failed_validation = None
        merged = self._merged("validate", results, self._controller.losses_in_call > 0)
        return CallResult(results, merged, False, LastCall("validate", time.time(), seconds))

    def _timed(self, trainer: Trainer, method: str, **arguments: Any) -> tuple[list[Any], float]:
        watcher = self._callback_list.watcher(trainer, method)
        started = time.perf_counter()
        results = self.make(method, on_wait=watcher, **arguments)
        return results, time.perf_counter() - started

    def _merged(
        self, method: str, results: Sequence[Mapping[str, Any]], lost: bool
    ) -> dict[str, Any]:
        merged = merge_workers(results)
        progress = self._controller.progress
        if method not in self._looked_at and len(results) > 1:
            self._looked_at.add(method)  # the first time alone: what differs once is not the same
            if doubt := _doubt(method, results, progress.unshared):
                logger.warning(doubt)
        covered = progress.num_covered
        if lost and covered is not None and NUM_SAMPLES in merged:
            # the steps are done, though what a lost worker measured of them is gone with it
            merged[NUM_SAMPLES] = covered
        return merged


def _doubt(method: str, results: Sequence[Mapping[str, Any]], unshared: bool) -> str | None:
    """Say what is most likely wrong with what several workers measured; None where nothing is."""
    first, *others = results
    means = {
        name: mean
        for name, mean in first.items()
        if isinstance(mean, float) and not isinstance(mean, Computed)
    }
    telling = {n: mean for n, mean in means.items() if math.isfinite(mean) and mean % 1}
    if unshared and telling and all(other.items() >= telling.items() for other in others):
        name, mean = next(iter(telling.items()))
        return (
            f"All {len(results)} workers measured the same in {method}() ({name}={mean:g}): each "
            "seems to read all of the loader, which is of a kind that cannot be shared out. Let "
            "each read a part of its own, by self.world_rank and self.world_size."
        )
    differ = any(other.get(name) != mean for name, mean in means.items() for other in others)
    if method == "validate" and NUM_SAMPLES not in first and differ:
        return (
            f"validate() of the operator returns no {NUM_SAMPLES!r}, so that each worker counts "
            "the same, however many samples it has: its means are not exact then. Return it beside "
            "them."
        )
    return None
