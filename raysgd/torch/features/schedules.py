"""Step schedulers, and detect schedulers that `train_batch` steps in each part of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from raysgd.loop.feature import StepFeature
from raysgd.loop.transaction import UpdateTransaction
from raysgd.torch.register_checks import required_arguments
from raysgd.torch.train_state import TorchTrainState


class Schedules(StepFeature):
    def __init__(self, state: TorchTrainState, check_complete: Callable[[], None]) -> None:
        self._state, self._check_complete = state, check_complete
        self._last_epochs: list[Any] = []
        self._states: list[Any] | None = None
        self._rates: list[dict[str, Any]] = []

    def step(self) -> None:
        """See :meth:`TrainingOperator.step_schedulers`."""
        tx = self._state.transaction
        is_skipped = (
            tx.steps.are_skipped and self._state.settings.options.scheduler_step_freq == "batch"
        )
        if is_skipped or not tx.micro_batch.ends_step:
            return
        if tx.is_last:
            self._check_complete()
        for scheduler in self._state.schedulers:
            scheduler.step()
        self._note()

    def step_with(self, metric: float) -> None:
        """Step every scheduler. An optional ``epoch`` of its ``step`` does not get the metric."""
        for scheduler in self._state.schedulers:
            takes = next(iter(inspect.signature(scheduler.step).parameters), "epoch")
            has_metric = takes != "epoch" or required_arguments(scheduler.step)
            scheduler.step(*[metric] if has_metric else [])

    def _note(self) -> None:
        schedulers = self._state.schedulers
        self._last_epochs = [getattr(each, "last_epoch", None) for each in schedulers]

    def begin(self, tx: UpdateTransaction) -> None:
        self._states = None

    def begin_micro_batch(self, tx: UpdateTransaction) -> None:
        """Undo and reject a scheduler step that `train_batch` makes in a part of a batch."""
        if not tx.is_split:
            return
        train_state = self._state
        groups = [group for o in train_state.optimizers for group in o.param_groups]
        if self._states is None:
            self._states = [scheduler.state_dict() for scheduler in train_state.schedulers]
            self._rates = [{k: v for k, v in group.items() if k != "params"} for group in groups]
            self._note()
            return
        before = self._last_epochs
        self._note()
        if self._last_epochs != before:
            for scheduler, state in zip(train_state.schedulers, self._states, strict=True):
                scheduler.load_state_dict(state)
            for group, rates in zip(groups, self._rates, strict=True):
                group.update(rates)
            train_state.micro_batching.refuse("train_batch steps a scheduler itself")
