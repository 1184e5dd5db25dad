"""TensorBoard."""

from __future__ import annotations

import json
import os
from typing import Any

from raysgd.callbacks.base import LastCall, Trainer
from raysgd.callbacks.lazy import import_for
from raysgd.callbacks.logger import LoggerCallback, folder_for
from raysgd.callbacks.values import jsonable, numbers_in, scalars
from raysgd.elastic.events import Event

__all__ = ["TensorBoardLogger"]


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
        import_for("TensorBoardLogger", "tensorboard")
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
        writer, step = self._opened(trainer), trainer.global_step
        values = numbers_in(metrics)
        for name, value in values.items():
            writer.add_scalar(f"{call.kind}/{name}", value, step, walltime=call.time)
        if "num_samples" in values and call.seconds > 0:
            speed = values["num_samples"] / call.seconds
            writer.add_scalar(f"speed/{call.kind}_samples_per_s", speed, step, walltime=call.time)
        writer.add_scalar("workers/num_workers", trainer.num_workers, step, walltime=call.time)
        writer.flush()

    def log_event(self, trainer: Trainer, event: Event) -> None:
        """Write an event as text, and the number of workers that it left."""
        writer = self._opened(trainer)
        ranks = ", ".join(map(str, event.ranks)) or "none"
        text = f"**{event.kind}**: ranks {ranks}; {event.num_workers} workers\n\n{event.cause}"
        writer.add_text("events", text, event.step, walltime=event.time)
        writer.add_scalar("workers/num_workers", event.num_workers, event.step, walltime=event.time)
        writer.flush()

    def close(self, trainer: Trainer) -> None:
        """Close the file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.file_writer.add_summary(self._end_of_session)
            writer.close()

    def _opened(self, trainer: Trainer) -> Any:
        """Return the writer."""
        if self._writer is None:
            tensorboard = import_for("TensorBoardLogger", "torch.utils.tensorboard")
            folder = folder_for(self, trainer, self._folder, "tensorboard")
            # what a run that was killed had written beyond the step it goes on from is hidden
            purge_step = self._began_at + 1
            self._writer = tensorboard.SummaryWriter(str(folder), purge_step=purge_step)
            self._write_config(trainer.config)
        return self._writer

    def _write_config(self, config: dict[str, Any]) -> None:
        summary = import_for("TensorBoardLogger", "torch.utils.tensorboard.summary")
        experiment, start, self._end_of_session = summary.hparams(scalars(config), {})
        self._writer.file_writer.add_summary(experiment)
        self._writer.file_writer.add_summary(start)
        shown = {str(key): _shown(value) for key, value in config.items()}
        self._writer.add_text("config", f"```json\n{json.dumps(shown, indent=1)}\n```")


def _shown(value: Any) -> Any:
    try:
        return jsonable(value)
    except TypeError:
        return repr(value)
