"""The callback for Weights & Biases."""

from __future__ import annotations

from typing import Any

from raysgd._internal.imports import import_extra
from raysgd.callbacks.base import LastCall, Trainer
from raysgd.callbacks.logger import ServiceLogger, logdir_of, named_metrics
from raysgd.callbacks.values import json_dict, shown_config
from raysgd.elastic.events import Event

_STEP = "global_step"


class WandbLogger(ServiceLogger):
    """Writes a run of Weights & Biases.

    Metrics are ``train/NAME`` and ``validate/NAME`` by ``global_step``, ``workers/num_workers``,
    and the kinds of events, ``event``.

    Args:
        project: name of the project.
        arguments: further arguments of ``wandb.init``, such as ``mode="offline"``. The default of
            ``dir`` is the trainer's ``logdir``.

    Raises:
        ImportError: if wandb is not installed.
    """

    def __init__(self, project: str = "raysgd", **arguments: Any) -> None:
        import_extra("WandbLogger", "wandb", "callbacks")
        self._given = {"project": project, **arguments}
        self.run_id = arguments.get("id")

    def log(self, trainer: Trainer, call: LastCall, metrics: dict[str, Any]) -> None:
        super().log(trainer, call, metrics)
        values = named_metrics(trainer, call, metrics)
        self._opened(trainer).log({**values, _STEP: trainer.global_step})

    def log_event(self, trainer: Trainer, event: Event) -> None:
        values = {"event": event.kind, "workers/num_workers": event.num_workers}
        self._opened(trainer).log({**values, _STEP: event.step})

    def _open(self, trainer: Trainer) -> Any:
        import wandb

        given = {
            "config": json_dict(shown_config(trainer.config)),
            "reinit": "create_new",  # otherwise wandb returns the process's open run
            "dir": None if trainer.logdir is None else str(logdir_of(trainer)),
            **self._given,
        }
        if self.run_id is not None:
            given |= {"id": self.run_id, "resume": "allow"}
        run = wandb.init(**given)
        self.run_id = run.id
        # Steps in wandb cannot decrease, but a restart from a snapshot repeats steps.
        run.define_metric("*", step_metric=_STEP)
        return run

    def _end(self, run: Any, failed: bool) -> None:
        run.finish(exit_code=int(failed))
