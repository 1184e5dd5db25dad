"""What the callbacks that write metrics somewhere have in common."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from raysgd._internal.paths import checked_path
from raysgd.callbacks.base import Callback, LastCall, Trainer
from raysgd.callbacks.values import numbers_in
from raysgd.elastic.events import Event

__all__ = ["LoggerCallback", "end_line", "folder_for", "measured", "record_of"]


class LoggerCallback(Callback):
    """Writes the result of each call and each event somewhere.

    Override `log`, `log_event` and `close`.
    """

    is_running = False
    """Whether it has started and not ended. What happens in between two runs it lets pass."""

    def log(self, trainer: Trainer, call: LastCall, metrics: dict[str, Any]) -> None:
        """Write the result of one ``train()`` or ``validate()``, or of some steps, by its kind."""

    def log_event(self, trainer: Trainer, event: Event) -> None:
        """Write an event."""

    def close(self, trainer: Trainer) -> None:
        """Close what is open; called in the end, also after an exception."""

    def on_train_start(self, trainer: Trainer) -> None:
        """Begin."""
        self.is_running = True

    def on_train_end(self, trainer: Trainer) -> None:
        """End."""
        self.is_running = False
        self.close(trainer)

    def on_epoch_end(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        """Write the result of a call."""
        assert trainer.last_call is not None
        self.log(trainer, trainer.last_call, metrics)

    on_steps_end = on_validation_end = on_epoch_end

    def on_log(self, trainer: Trainer, call: LastCall, metrics: dict[str, Any]) -> None:
        """Write what some steps have measured."""
        self.log(trainer, call, metrics)

    def on_event(self, trainer: Trainer, event: Event) -> None:
        """Write an event."""
        if self.is_running:
            self.log_event(trainer, event)


def record_of(trainer: Trainer, call: LastCall) -> dict[str, Any]:
    """Return what files tell of a call beside its metrics."""
    record = {
        "kind": call.kind,
        "time": call.time,
        "seconds": call.seconds,
        "epoch": trainer.epoch,
        "global_step": trainer.global_step,
        "num_workers": trainer.num_workers,
    }
    return record if trainer.split == 1 else {**record, "split": trainer.split}


def measured(trainer: Trainer, call: LastCall, metrics: dict[str, Any]) -> dict[str, float | int]:
    """Return the numbers of a call by the names that services show them under."""
    numbers = {f"{call.kind}/{name}": value for name, value in numbers_in(metrics).items()}
    return {**numbers, "workers/num_workers": trainer.num_workers}


def folder_for(trainer: Trainer, given: str | os.PathLike[str] | None, *below: str) -> Path:
    """Return the folder that a callback was given, or the one in the run folder."""
    if given is not None:
        return checked_path("folder", given).absolute()
    assert trainer.logdir is not None  # `needs_logdir`
    return trainer.logdir.joinpath(*below)


def end_line(path: Path) -> None:
    """End the last line of a file whose writer was killed in the midst of it."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
