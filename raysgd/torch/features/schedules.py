"""Step schedulers, and detect schedulers that `train_batch` steps in each part of a batch."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from raysgd.data.partition import MicroBatch
from raysgd.loop.feature import StepFeature
from raysgd.torch.register_checks import required_arguments

if TYPE_CHECKING:
    from raysgd.torch.train_state import TorchTrainState


class Schedules(StepFeature):
    def __init__(self, state: TorchTrainState) -> None:
        self._state = state
        self._last_epochs: list[Any] = []
        self._states: list[Any] = []
        self._rates: list[dict[str, Any]] = []

    def step(self) -> None:
        """See :meth:`TrainingOperator.step_schedulers`."""
        state, place = self._state, self._state.step.place
        if not place.ends_step:
            return
        if place.is_last:
            state.optimization.check_complete()
        for scheduler in state.schedulers:
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

    def begin_batch(self, place: MicroBatch) -> None:
        """Undo and reject a scheduler step that `train_batch` makes in a part of a batch."""
        if not place.is_part:
            return
        train_state = self._state
        groups = [group for o in train_state.optimizers for group in o.param_groups]
        if place.position == 0:
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
            train_state.parts.refuse("train_batch steps a scheduler itself", place)
