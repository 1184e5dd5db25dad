"""The callback for TensorBoard."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Mapping
from typing import Any

from raysgd._internal.imports import import_extra
from raysgd.callbacks.base import LastCall, Trainer
from raysgd.callbacks.logger import LoggerCallback, logdir_of, named_metrics
from raysgd.callbacks.values import json_dict, shown_config
from raysgd.elastic.events import Event


class TensorBoardLogger(LoggerCallback):
    """Writes files for ``tensorboard --logdir FOLDER``, in ``tensorboard`` in the ``logdir``.

    The scalars by step are ``train/NAME`` and ``validate/NAME`` for each metric, ``step/NAME`` with
    ``fit(log_every=...)``, ``workers/num_workers``, and ``speed/train_samples_per_s``. Events are
    texts, such as ``events/lost``, and so is the ``config``.

    Raises:
        ImportError: if tensorboard is not installed.
    """

    needs_logdir = True

    def __init__(self) -> None:
        self._new_board = summary_writer_cls("TensorBoardLogger")
        self._board: Any = None

    def on_train_start(self, trainer: Trainer) -> None:
        folder = logdir_of(trainer) / "tensorboard"
        # Hide later steps, which were trained after the checkpoint.
        self._board = self._new_board(str(folder), purge_step=trainer.global_step + 1)
        shown = json.dumps(json_dict(shown_config(trainer.config)), indent=1)
        self._board.add_text("config", f"```json\n{shown}\n```")

    def log(self, trainer: Trainer, call: LastCall, metrics: dict[str, Any]) -> None:
        values = named_metrics(trainer, call, metrics)
        if f"{call.kind}/num_samples" in values and call.seconds > 0:
            speed = values[f"{call.kind}/num_samples"] / call.seconds
            values[f"speed/{call.kind}_samples_per_s"] = speed
        add_scalars(self._board, values, trainer.global_step, call.time)

    def on_event(self, trainer: Trainer, event: Event) -> None:
        ranks = ", ".join(map(str, event.ranks)) or "none"
        text = f"**{event.kind}**: ranks {ranks}; {event.num_workers} workers\n\n{event.cause}"
        self._board.add_text(f"events/{event.kind}", text, event.step, walltime=event.time)
        values = {"workers/num_workers": event.num_workers}
        add_scalars(self._board, values, event.step, event.time)

    def on_train_end(self, trainer: Trainer) -> None:
        self._board.close()


def summary_writer_cls(owner: str) -> Any:
    """Import the PyTorch writer for TensorBoard. `owner` is the callback that errors name."""
    import_extra(owner, "tensorboard", "callbacks")
    if "tensorflow" not in sys.modules:
        # Disable TensorFlow in TensorBoard: importing it takes seconds.
        sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("notf"))
    return import_extra(owner, "torch.utils.tensorboard", "callbacks").SummaryWriter


def add_scalars(
    board: Any, values: Mapping[str, float], step: int | None, time_s: float | None = None
) -> None:
    """Write numbers with a time in seconds since the epoch; None for now."""
    for name, value in values.items():
        board.add_scalar(name, value, step, walltime=time_s)
    board.flush()
