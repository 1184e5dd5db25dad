"""Step schedulers, and restore them and options of optimizers if a step or micro-batch repeats."""

import inspect
from collections.abc import Callable
from functools import partial

from raysgd._internal.nested import map_leaves
from raysgd.loop.feature import UpdateFeature
from raysgd.loop.update import Update
from raysgd.torch.features.rollback import OptimizerBackup
from raysgd.torch.features.step_checks import StepChecks
from raysgd.torch.object_states import load_scheduler, scheduler_state
from raysgd.torch.register_checks import required_arguments
from raysgd.torch.train_state import TorchTrainState


class Schedules(UpdateFeature):
    def __init__(self, train_state: TorchTrainState, checks: StepChecks) -> None:
        self._train_state, self._checks = train_state, checks
        self._at_update: list[Callable[[], None]] = []  # functions that restore what it began with
        self._at_step = self._at_update

    def step(self, update: Update) -> None:
        """See :meth:`TrainingOperator.step_schedulers`."""
        per_batch = self._train_state.scheduler_step_freq == "batch"
        is_skipped = update.optimizer_steps.are_skipped and per_batch
        if is_skipped or not update.micro_batch.ends_step:
            return
        if update.in_last_micro_batch:
            self._checks.before_commit(update)  # also before a scheduler steps
        for scheduler in self._train_state.schedulers:
            scheduler.step()

    def step_with_metric(self, metric: float) -> None:
        """Step every scheduler. An optional ``epoch`` of its ``step`` does not get the metric."""
        for scheduler in self._train_state.schedulers:
            takes = next(iter(inspect.signature(scheduler.step).parameters), "epoch")
            has_metric = takes != "epoch" or required_arguments(scheduler.step)
            scheduler.step(*[metric] if has_metric else [])

    def begin_micro_batch(self, update: Update) -> None:
        """Begin each micro-batch of a step with the same rates, which `train_batch` may change."""
        if not update.micro_batch_index:
            self._at_update = self._copies()
        if update.is_split:
            for restore in () if update.begins_step else self._at_step:
                restore()
            self._at_step = self._copies()

    def commit(self, update: Update) -> None:
        self._at_update = self._at_step = []

    def roll_back(self, update: Update) -> None:
        for restore in self._at_update:  # the update may fail after schedulers have stepped
            restore()
        self.commit(update)

    def _copies(self) -> list[Callable[[], None]]:
        schedulers, optimizers = self._train_state.schedulers, self._train_state.optimizers
        states = map_leaves(list(map(scheduler_state, schedulers)), lambda leaf: leaf)  # new lists
        pairs = zip(schedulers, states, strict=True)
        restore = [partial(load_scheduler, scheduler, state) for scheduler, state in pairs]
        return restore + [OptimizerBackup(optimizer).restore for optimizer in optimizers]
