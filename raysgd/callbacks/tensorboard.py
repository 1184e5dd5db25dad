"""TensorBoard."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from raysgd.callbacks.base import LastCall, Trainer
from raysgd.callbacks.logger import LoggerCallback, folder_for, measured
from raysgd.callbacks.values import json_dict, scalars, shown_config, shown_repr
from raysgd.elastic.events import Event
from raysgd.imports import import_extra

__all__ = ["TensorBoardLogger", "write_scalars"]


class TensorBoardLogger(LoggerCallback):
    """Writes what ``tensorboard --logdir FOLDER`` shows.

    Scalars over the training steps: ``train/NAME`` and ``validate/NAME`` for each metric,
    ``workers/num_workers``, and ``speed/train_samples_per_s``. Events are texts. The numbers and
    texts in the trainer's config are hyper-parameters.

    Args:
        folder: where to; None for ``tensorboard`` in the trainer's ``logdir``.

    Raises:
        ImportError: if tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        import_extra("TensorBoardLogger", "tensorboard", "callbacks")
        self._folder = folder
        self.needs_logdir = folder is None
        self._writer: Any = None
        self._end_of_session: Any = None
        self._began_at = 0

    def on_train_start(self, trainer: Trainer) -> None:
        """Note where training goes on from."""
        super().on_train_start(trainer)
        self._began_at = trainer.global_step

    def log(self, trainer: Trainer, call: LastCall, metrics: dict[str, Any]) -> None:
        """Write the result of a call."""
        values = measured(trainer, call, metrics)
        if f"{call.kind}/num_samples" in values and call.seconds > 0:
            speed = values[f"{call.kind}/num_samples"] / call.seconds
            values[f"speed/{call.kind}_samples_per_s"] = speed
        write_scalars(self._opened(trainer), values, trainer.global_step, call.time)

    def log_event(self, trainer: Trainer, event: Event) -> None:
        """Write an event as text, and the number of workers that it left."""
        writer = self._opened(trainer)
        ranks = ", ".join(map(str, event.ranks)) or "none"
        text = f"**{event.kind}**: ranks {ranks}; {event.num_workers} workers\n\n{event.cause}"
        writer.add_text("events", text, event.step, walltime=event.time)
        left = {"workers/num_workers": event.num_workers}
        write_scalars(writer, left, event.step, event.time)

    def close(self, trainer: Trainer) -> None:
        """Close the file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.file_writer.add_summary(self._end_of_session)
            writer.close()

    def _opened(self, trainer: Trainer) -> Any:
        """Return the writer."""
        if self._writer is None:
            tensorboard = import_extra("TensorBoardLogger", "torch.utils.tensorboard", "callbacks")
            folder = folder_for(trainer, self._folder, "tensorboard")
            # what a run that was killed had written beyond the step it goes on from is hidden
            purge_step = self._began_at + 1
            self._writer = tensorboard.SummaryWriter(str(folder), purge_step=purge_step)
            self._write_config(shown_config(trainer.config))
        return self._writer

    def _write_config(self, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import summary

        experiment, start, self._end_of_session = summary.hparams(scalars(config), {})
        self._writer.file_writer.add_summary(experiment)
        self._writer.file_writer.add_summary(start)
        shown = json.dumps(json_dict(config, shown_repr), indent=1)
        self._writer.add_text("config", f"```json\n{shown}\n```")


def write_scalars(
    writer: Any, values: Mapping[str, float], step: int | None, time_s: float | None = None
) -> None:
    """Write numbers, as of a time in seconds since the epoch, None for now."""
    for name, value in values.items():
        writer.add_scalar(name, value, step, walltime=time_s)
    writer.flush()
