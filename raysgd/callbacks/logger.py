"""What the callbacks that write metrics somewhere have in common."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from raysgd.callbacks.base import Callback, LastCall, Trainer
from raysgd.elastic.events import Event

__all__ = ["LoggerCallback", "end_line", "folder_for"]


class LoggerCallback(Callback):
    """Writes the result of each call and each event somewhere.

    Override `log`, `log_event` and `close`.
    """

    is_running = False
    """Whether it has started and not ended. What happens in between two runs it lets pass."""

    def log(self, trainer: Trainer, call: LastCall, metrics: dict[str, Any]) -> None:
        """Write the result of one ``train()`` or ``validate()``."""

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
        """Write the result of a ``train()``."""
        self._log(trainer, metrics)

    def on_steps_end(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        """Write the result of a ``train(num_steps=...)``."""
        self._log(trainer, metrics)

    def on_validation_end(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        """Write the result of a ``validate()``."""
        self._log(trainer, metrics)

    def on_event(self, trainer: Trainer, event: Event) -> None:
        """Write an event."""
        if self.is_running:
            self.log_event(trainer, event)

    def _log(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        call = trainer.last_call
        assert call is not None
        self.log(trainer, call, metrics)


def folder_for(
    callback: Callback, trainer: Trainer, given: str | os.PathLike[str] | None, *below: str
) -> Path:
    """Return the folder that a callback was given, or the one in the run folder.

    Raises:
        ValueError: if there is neither.
    """
    if given is not None:
        return Path(given).expanduser().absolute()
    if trainer.logdir is not None:
        return trainer.logdir.joinpath(*below)
    name = type(callback).__name__
    raise ValueError(
        f"{name} does not know where to write: pass it a folder, {name}('runs/1'), or give the "
        "trainer one for the whole run, TorchTrainer(logdir='runs/1')."
    )


def end_line(path: Path) -> None:
    """End the last line of a file whose writer was killed in the midst of it."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
