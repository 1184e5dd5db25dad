"""What the callbacks that write metrics somewhere have in common."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

from raysgd.callbacks.base import Callback, LastCall, Trainer
from raysgd.elastic.events import Event

__all__ = ["LoggerCallback", "check_folder", "end_line", "folder_for"]

_PLACES = {"folder": "runs/1", "path": "runs/1/metrics.csv"}
"""What callbacks call the place that they write to, and an example of one."""


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
    if trainer.logdir is None:
        raise _no_folder(callback)
    return trainer.logdir.joinpath(*below)


def check_folder(callback: Callback, logdir: Path | None) -> None:
    """Check, when a callback is attached, that there is a folder for what it writes.

    Raises:
        ValueError: if it needs the trainer's, and that has none.
    """
    if callback.needs_logdir and logdir is None:
        raise _no_folder(callback)


def _no_folder(callback: Callback) -> ValueError:
    name, taken = type(callback).__name__, inspect.signature(type(callback)).parameters
    own = [f"{argument}={example!r}" for argument, example in _PLACES.items() if argument in taken]
    advice = f"pass it one, {name}({own[0]}), or give" if own else "give"
    return ValueError(
        f"{name} does not know where to write: {advice} the trainer a folder for the whole run, "
        "logdir='runs/1'."
    )


def end_line(path: Path) -> None:
    """End the last line of a file whose writer was killed in the midst of it."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
