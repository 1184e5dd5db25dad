"""Step schedulers, and restore those that `train_batch` steps in each micro-batch."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from raysgd.loop.feature import UpdateFeature
from raysgd.loop.update import Update
from raysgd.torch.features.step_checks import StepChecks
from raysgd.torch.object_states import load_scheduler, scheduler_state
from raysgd.torch.register_checks import required_arguments
from raysgd.torch.registered import RegisteredObjects
from raysgd.torch.tensors import copy_leaf


class Schedules(UpdateFeature):
    def __init__(self, registered: RegisteredObjects, checks: StepChecks) -> None:
        self._registered, self._checks = registered, checks
        self._states_at_update: list[Any] = []  # states of schedulers
        self._states_at_step: list[Any] = []
        self._rates: list[dict[str, Any]] = []

    def step(self, update: Update) -> None:
        """See :meth:`TrainingOperator.step_schedulers`."""
        per_batch = self._registered.scheduler_step_freq == "batch"
        is_skipped = update.optimizer_steps.are_skipped and per_batch
        if is_skipped or not update.micro_batch.ends_step:
            return
        if update.in_last_micro_batch:
            self._checks.before_commit(update)  # also before a scheduler steps
        for scheduler in self._registered.schedulers:
            scheduler.step()

    def step_with_metric(self, metric: float) -> None:
        """Step every scheduler. An optional ``epoch`` of its ``step`` does not get the metric."""
        for scheduler in self._registered.schedulers:
            takes = next(iter(inspect.signature(scheduler.step).parameters), "epoch")
            has_metric = takes != "epoch" or required_arguments(scheduler.step)
            scheduler.step(*[metric] if has_metric else [])

    def begin_micro_batch(self, update: Update) -> None:
        """Begin each micro-batch of a step with the same rates, which `train_batch` may change."""
        registered = self._registered
        if not (update.is_split or (registered.schedulers and update.optimizer_steps.need_copies)):
            return
        groups = [g for o in registered.optimizers if update.is_split for g in o.param_groups]
        if update.begins_step:
            self._states_at_step = list(map(scheduler_state, registered.schedulers))
            self._states_at_update = self._states_at_update or self._states_at_step
            self._rates = [{k: (g[k], copy_leaf(g[k])) for k in g if k != "params"} for g in groups]
        else:
            self._restore(self._states_at_step)
            for group, rates in zip(groups, self._rates, strict=True):
                for name, (rate, old) in rates.items():
                    if torch.is_tensor(rate):  # user code may hold it
                        rate.data.copy_(old)
                    group[name] = rate if torch.is_tensor(rate) else copy_leaf(old)

    def commit(self, update: Update) -> None:
        self._states_at_update = []

    def roll_back(self, update: Update) -> None:
        self._restore(self._states_at_update)  # the update may fail after schedulers have stepped
        self._states_at_update = []

    def _restore(self, states: Sequence[Any]) -> None:
        for scheduler, state in zip(self._registered.schedulers, states, strict=False):
            load_scheduler(scheduler, state)
