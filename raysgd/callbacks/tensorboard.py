"""The callback for TensorBoard."""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raysgd._internal.imports import import_extra
from raysgd.callbacks.base import LastCall, Trainer
from raysgd.callbacks.logger import LoggerCallback, folder_for, named_metrics
from raysgd.callbacks.values import json_dict, shown_config
from raysgd.elastic.events import Event


class TensorBoardLogger(LoggerCallback):
    """Writes files for ``tensorboard --logdir FOLDER``.

    The scalars by step are ``train/NAME`` and ``validate/NAME`` for each metric, ``step/NAME`` with
    ``fit(log_every=...)``, ``workers/num_workers``, and ``speed/train_samples_per_s``. Events are
    texts, such as ``events/lost``, and so is the ``config``.

    Args:
        folder: where to write; None for ``tensorboard`` in the trainer's ``logdir``.

    Raises:
        ImportError: if tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._writer = TensorBoardWriter("TensorBoardLogger")
        self._folder = folder
        self.needs_logdir = folder is None
        self._began_at = 0

    def on_train_start(self, trainer: Trainer) -> None:
        super().on_train_start(trainer)
        self._began_at = trainer.global_step

    def log(self, trainer: Trainer, call: LastCall, metrics: dict[str, Any]) -> None:
        values = named_metrics(trainer, call, metrics)
        if f"{call.kind}/num_samples" in values and call.seconds > 0:
            speed = values[f"{call.kind}/num_samples"] / call.seconds
            values[f"speed/{call.kind}_samples_per_s"] = speed
        self._opened(trainer).add_scalars(values, trainer.global_step, call.time)

    def log_event(self, trainer: Trainer, event: Event) -> None:
        writer, step, time_s = self._opened(trainer), event.step, event.time
        ranks = ", ".join(map(str, event.ranks)) or "none"
        text = f"**{event.kind}**: ranks {ranks}; {event.num_workers} workers\n\n{event.cause}"
        writer.summary_writer.add_text(f"events/{event.kind}", text, step, walltime=time_s)
        writer.add_scalars({"workers/num_workers": event.num_workers}, step, time_s)

    def close(self, trainer: Trainer) -> None:
        self._writer.close()

    def _opened(self, trainer: Trainer) -> TensorBoardWriter:
        if self._writer.summary_writer is None:
            folder = folder_for(trainer, self._folder, "tensorboard")
            # Hide later steps, which were trained after the checkpoint.
            board = self._writer.open(folder, self._began_at + 1)
            shown = json.dumps(json_dict(shown_config(trainer.config)), indent=1)
            board.add_text("config", f"```json\n{shown}\n```")
        return self._writer


class TensorBoardWriter:
    """Writes files for TensorBoard. `owner` is the callback that errors name."""

    def __init__(self, owner: str) -> None:
        import_extra(owner, "tensorboard", "callbacks")
        if "tensorflow" not in sys.modules:
            # Disable TensorFlow in TensorBoard: importing it takes seconds.
            sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("notf"))
        import_extra(owner, "torch.utils.tensorboard", "callbacks")
        self.summary_writer: Any = None
        """The PyTorch writer; None if no file is open."""

    def open(self, folder: Path, purge_step: int | None = None) -> Any:
        """Open a new file. TensorBoard hides the steps of older files from `purge_step` on."""
        from torch.utils.tensorboard import SummaryWriter

        self.summary_writer = SummaryWriter(str(folder), purge_step=purge_step)
        return self.summary_writer

    def add_scalars(
        self, values: Mapping[str, float], step: int | None, time_s: float | None = None
    ) -> None:
        """Write numbers with a time in seconds since the epoch; None for now."""
        for name, value in values.items():
            self.summary_writer.add_scalar(name, value, step, walltime=time_s)
        self.summary_writer.flush()

    def close(self) -> None:
        """Close the file, if one is open."""
        if self.summary_writer is not None:
            self.summary_writer.close()
            self.summary_writer = None
