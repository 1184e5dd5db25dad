"""Step schedulers, and begin each micro-batch of a step with the same schedules."""

import inspect
from collections.abc import Callable

from raysgd.loop.feature import UpdateFeature
from raysgd.loop.update import Update
from raysgd.torch.features.rollback import OptimizerBackup, backup_schedulers
from raysgd.torch.features.step_checks import StepChecks
from raysgd.torch.register_checks import required_arguments
from raysgd.torch.train_state import TorchTrainState


class LRScheduling(UpdateFeature):
    def __init__(self, train_state: TorchTrainState, checks: StepChecks) -> None:
        self._train_state, self._checks = train_state, checks
        self._at_step: list[Callable[[], None]] = []  # functions that restore what it began with

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
        if not (update.begins_step and update.micro_batch.ends_step):
            for restore in () if update.begins_step else self._at_step:
                restore()
            optimizers = map(OptimizerBackup, self._train_state.optimizers)
            self._at_step = [backup_schedulers(self._train_state.schedulers)]
            self._at_step += [backup.restore for backup in optimizers]
