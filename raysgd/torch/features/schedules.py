"""Step schedulers, and detect schedulers that `train_batch` steps in each micro-batch."""

from __future__ import annotations

import inspect
from typing import Any

from raysgd.loop.feature import UpdateFeature
from raysgd.loop.update import Update
from raysgd.torch.features.step_checks import StepChecks
from raysgd.torch.object_states import load_scheduler, scheduler_state
from raysgd.torch.register_checks import required_arguments
from raysgd.torch.registered import RegisteredObjects


class Schedules(UpdateFeature):
    def __init__(self, registered: RegisteredObjects, checks: StepChecks) -> None:
        self._registered, self._checks = registered, checks
        self._last_epochs: list[Any] = []
        self._states: list[Any] | None = None
        self._rates: list[dict[str, Any]] = []

    def step(self) -> None:
        """See :meth:`TrainingOperator.step_schedulers`."""
        update, frequency = self._registered.update, self._registered.scheduler_step_freq
        is_skipped = update.optimizer_steps.are_skipped and frequency == "batch"
        if is_skipped or not update.micro_batch.ends_step:
            return
        if update.in_last_micro_batch:
            self._checks.before_commit(update)  # also before a scheduler steps
        for scheduler in self._registered.schedulers:
            scheduler.step()
        self._record_epochs()

    def step_with(self, metric: float) -> None:
        """Step every scheduler. An optional ``epoch`` of its ``step`` does not get the metric."""
        for scheduler in self._registered.schedulers:
            takes = next(iter(inspect.signature(scheduler.step).parameters), "epoch")
            has_metric = takes != "epoch" or required_arguments(scheduler.step)
            scheduler.step(*[metric] if has_metric else [])

    def _record_epochs(self) -> None:
        self._last_epochs = [getattr(s, "last_epoch", None) for s in self._registered.schedulers]

    def begin_micro_batch(self, update: Update) -> None:
        """Undo and reject a scheduler step that `train_batch` makes in each micro-batch."""
        registered = self._registered
        if not registered.schedulers or not (update.is_split or update.optimizer_steps.need_copies):
            return
        groups = [group for o in registered.optimizers for group in o.param_groups]
        if self._states is None:
            self._states = list(map(scheduler_state, registered.schedulers))
            self._rates = [{k: v for k, v in group.items() if k != "params"} for group in groups]
            self._record_epochs()
            return
        before = self._last_epochs
        self._record_epochs()
        if update.is_split and self._last_epochs != before:
            self._restore()
            for group, rates in zip(groups, self._rates, strict=True):
                group.update(rates)
            registered.refuse_split("train_batch steps a scheduler itself")

    def commit(self, update: Update) -> None:
        self._states = None

    def roll_back(self, update: Update) -> None:
        self._restore()  # the update may fail after schedulers have stepped
        self._states = None

    def _restore(self) -> None:
        for scheduler, state in zip(self._registered.schedulers, self._states or (), strict=False):
            load_scheduler(scheduler, state)
