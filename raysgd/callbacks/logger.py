"""The base class of callbacks that write metrics, and their helpers."""

from __future__ import annotations

import os
from pathlib import Path
from statistics import mean
from typing import Any

from raysgd._internal.step_timing import PHASES
from raysgd.callbacks.base import Callback, LastCall, Trainer
from raysgd.callbacks.values import numbers_in

_PHASES = [f"{name}_s" for name in PHASES]


class LoggerCallback(Callback):
    """Writes the result of each call. Override `log`, and hooks such as `on_event`."""

    def log(self, trainer: Trainer, call: LastCall, metrics: dict[str, Any]) -> None:
        """Write the result of ``train()``, ``validate()``, or some steps: see ``call.kind``."""

    def on_epoch_end(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        assert trainer.last_call is not None
        self.log(trainer, trainer.last_call, metrics)

    on_steps_end = on_validation_end = on_epoch_end

    def on_log(self, trainer: Trainer, call: LastCall, metrics: dict[str, Any]) -> None:
        self.log(trainer, call, metrics)


def named_metrics(
    trainer: Trainer, call: LastCall, metrics: dict[str, Any]
) -> dict[str, float | int]:
    """Return the numbers of a call under the names that services use."""
    numbers = {f"{call.kind}/{name}": value for name, value in numbers_in(metrics).items()}
    speed = {f"speed/{name}": mean(call.speed[name]) for name in call.speed if name in _PHASES}
    return {**numbers, **speed, "workers/num_workers": trainer.num_workers}


def logdir_of(trainer: Trainer) -> Path:
    """Return the run folder of a trainer that has one, because of `needs_logdir`."""
    folder: Path = trainer.logdir
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def end_line(path: Path) -> None:
    """End an incomplete last line, which a killed writer can leave in a file."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
