"""Weights & Biases."""

from __future__ import annotations

import os
from typing import Any, Literal

from raysgd._internal.imports import import_extra
from raysgd.callbacks.base import LastCall, Trainer
from raysgd.callbacks.logger import LoggerCallback, folder_for, measured
from raysgd.callbacks.values import json_dict, shown_config, shown_repr
from raysgd.elastic.events import Event

__all__ = ["WandbLogger"]

_STEP = "global_step"


class WandbLogger(LoggerCallback):
    """Writes a run of Weights & Biases.

    Metrics are ``train/NAME`` and ``validate/NAME`` over ``global_step``, and
    ``workers/num_workers``; events are ``events/KIND``, counted, and in the run's notes of the
    console. A run that is resumed from a checkpoint goes on with the same run.

    Args:
        project: name of the project.
        mode: "online", "offline" (files in `folder` alone, no network and no login; ``wandb sync``
            uploads them later) or "disabled"; None for what ``WANDB_MODE`` says.
        folder: where the files go; None for the trainer's ``logdir``, else the current folder.
        arguments: further arguments of ``wandb.init``.

    Raises:
        ImportError: if wandb is not installed.
        ValueError: if `mode` is another.
    """

    def __init__(
        self,
        project: str = "raysgd",
        mode: Literal["online", "offline", "disabled"] | None = None,
        folder: str | os.PathLike[str] | None = None,
        **arguments: Any,
    ) -> None:
        import_extra("WandbLogger", "wandb", "callbacks")
        if mode not in (None, "online", "offline", "disabled"):
            raise ValueError(
                f'WandbLogger(mode={mode!r}): must be "online", "offline" or "disabled".'
            )
        self._project = project
        self._mode = mode
        self._folder = folder
        self._arguments = arguments
        self._run: Any = None
        self._failed = False
        self._num_events: dict[str, int] = {}
        self.run_id: str | None = arguments.get("id")
        """The id of the run; None before it has begun."""

    def log(self, trainer: Trainer, call: LastCall, metrics: dict[str, Any]) -> None:
        """Write the result of a call."""
        self._failed = False  # a call that failed before has been got over
        values = measured(trainer, call, metrics)
        self._opened(trainer).log({**values, _STEP: trainer.global_step})

    def log_event(self, trainer: Trainer, event: Event) -> None:
        """Write an event."""
        count = self._num_events[event.kind] = self._num_events.get(event.kind, 0) + 1
        self._opened(trainer).log(
            {
                f"events/{event.kind}": count,
                "workers/num_workers": event.num_workers,
                _STEP: event.step,
            }
        )

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Remember how the run ends."""
        self._failed = True

    def close(self, trainer: Trainer) -> None:
        """End the run."""
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=int(self._failed))

    def state_dict(self) -> dict[str, Any]:
        """Return which run it is."""
        if self.run_id is None:
            return {}
        return {"run_id": self.run_id, "num_events": dict(self._num_events)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with that run, unless another has begun."""
        if self._run is None:
            self.run_id, self._num_events = state.get("run_id"), dict(state.get("num_events", {}))

    def _opened(self, trainer: Trainer) -> Any:
        """Return the run; it does not begin before the trainer stands where it will go on from."""
        if self._run is None:
            import wandb

            self._failed = False
            given = {
                "project": self._project,
                "config": json_dict(shown_config(trainer.config), shown_repr),
                "reinit": "create_new",  # else wandb returns the run that the process has already
                **self._arguments,
            }
            if self._mode is not None:
                given["mode"] = self._mode
            if self._folder is not None or trainer.logdir is not None:
                given["dir"] = str(folder_for(trainer, self._folder))
                os.makedirs(given["dir"], exist_ok=True)
            if self.run_id is not None:
                given |= {"id": self.run_id, "resume": "allow"}
            self._run = wandb.init(**given)
            self.run_id = self._run.id
            # steps may go back, after a restart from a snapshot, which wandb's own must not
            self._run.define_metric("*", step_metric=_STEP)
        return self._run
