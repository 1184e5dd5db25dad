"""Find schedulers that nobody steps, and those that `train_batch` steps in each part of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raysgd.data.partition import MicroBatch
from raysgd.loop.feature import StepFeature
from raysgd.torch.register_checks import needs_metric

if TYPE_CHECKING:
    from raysgd.torch.registration import TorchRegistration

__all__ = ["Schedules"]


class Schedules(StepFeature):
    """Watches the registered schedulers."""

    def __init__(self, registration: TorchRegistration) -> None:
        self._registration = registration
        self._last_epochs: list[Any] = []
        self._states: list[Any] = []
        self._rates: list[dict[str, Any]] = []
        self._epochs_ended = 0

    def note(self) -> None:
        """Note how far schedulers are, when they may be stepped."""
        schedulers = self._registration.schedulers
        self._last_epochs = [getattr(each, "last_epoch", None) for each in schedulers]

    def begin_batch(self, place: MicroBatch) -> None:
        """Undo and refuse a step of a scheduler in a part of a batch: each part would make one."""
        if not place.is_part:
            return
        registration = self._registration
        groups = [group for o in registration.optimizers for group in o.param_groups]
        if place.position == 0:
            self._states = [scheduler.state_dict() for scheduler in registration.schedulers]
            self._rates = [{k: v for k, v in group.items() if k != "params"} for group in groups]
            self.note()
            return
        before = self._last_epochs
        self.note()
        if self._last_epochs != before:
            for scheduler, state in zip(registration.schedulers, self._states, strict=True):
                scheduler.load_state_dict(state)
            for group, rates in zip(groups, self._rates, strict=True):
                group.update(rates)
            registration.parts.refuse("train_batch steps a scheduler itself", place)

    def end_epoch(self, epoch: int) -> None:
        self._epochs_ended += 1
        registration = self._registration
        is_manual = registration.settings.options.scheduler_step_freq == "manual"
        if self._epochs_ended != 2 or not is_manual:
            return
        if any(map(needs_metric, registration.schedulers)) and not any(
            getattr(each, "last_epoch", 1) for each in registration.schedulers
        ):
            registration.say(
                "unstepped",
                "Two epochs are over, and no scheduler was stepped: with "
                'scheduler_step_freq="manual" only trainer.update_scheduler(metric) does it. '
                'With "epoch" and monitor="val_loss" fit() steps a ReduceLROnPlateau.',
            )
