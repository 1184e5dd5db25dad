"""TensorBoard."""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Mapping
from typing import Any

from raysgd._internal.imports import import_extra
from raysgd.callbacks.base import LastCall, Trainer
from raysgd.callbacks.logger import LoggerCallback, folder_for, measured
from raysgd.callbacks.values import json_dict, scalars, shown_config, shown_repr
from raysgd.elastic.events import Event
from raysgd.metrics import BATCH_COUNT, NUM_SAMPLES

__all__ = ["TensorBoardLogger", "import_writer", "write_scalars"]


class TensorBoardLogger(LoggerCallback):
    """Writes what ``tensorboard --logdir FOLDER`` shows.

    Scalars over the training steps: ``train/NAME`` and ``validate/NAME`` for each metric, with
    ``fit(log_every=...)`` also ``step/NAME``, ``workers/num_workers``, and
    ``speed/train_samples_per_s``. What training and validation both
    have, such as the loss, shares a chart under "Custom scalars". Events are texts, one tag a kind:
    ``events/lost``. The numbers and texts in the trainer's config are hyper-parameters, the metrics
    theirs. TensorFlow is not imported for it.

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
        self._tags: set[str] = set()
        self._has_described = False
        self._end: Any = None
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
        writer, is_second = self._opened(trainer), not self._tags.isdisjoint(values)
        if call.kind != "step":
            self._tags |= values.keys()
            if call.kind == "validate" or is_second:  # TensorBoard takes the first description only
                self._describe(trainer)
        write_scalars(writer, values, trainer.global_step, call.time)

    def log_event(self, trainer: Trainer, event: Event) -> None:
        """Write an event as text, and the number of workers that it left."""
        writer = self._opened(trainer)
        ranks = ", ".join(map(str, event.ranks)) or "none"
        size = f"{event.num_workers} worker{'s' * (event.num_workers != 1)}"
        text = f"**{event.kind}**: ranks {ranks}; {size}\n\n{event.cause}"
        writer.add_text(f"events/{event.kind}", text, event.step, walltime=event.time)
        left = {"workers/num_workers": event.num_workers}
        write_scalars(writer, left, event.step, event.time)

    def close(self, trainer: Trainer) -> None:
        """Close the file."""
        if self._writer is not None:
            self._describe(trainer)
            self._writer.file_writer.add_summary(self._end)
            self._writer.close()
        self._writer, self._tags, self._has_described = None, set(), False

    def _opened(self, trainer: Trainer) -> Any:
        if self._writer is None:
            tensorboard = import_writer("TensorBoardLogger")
            folder = folder_for(trainer, self._folder, "tensorboard")
            # what a run that was killed had written beyond the step it goes on from is hidden
            purge_step = self._began_at + 1
            self._writer = tensorboard.SummaryWriter(str(folder), purge_step=purge_step)
            shown = json.dumps(json_dict(shown_config(trainer.config), shown_repr), indent=1)
            self._writer.add_text("config", f"```json\n{shown}\n```")
        return self._writer

    def _describe(self, trainer: Trainer) -> None:
        """Write, once a run, the hyper-parameters with their metrics, and which charts go together.

        Metrics that come later are in charts of their own alone.
        """
        if self._has_described:
            return
        self._has_described = True
        from torch.utils.tensorboard import summary

        metrics = sorted(tag for tag in self._tags if _is_judged(tag))
        config = scalars(shown_config(trainer.config))
        experiment, start, self._end = summary.hparams(config, dict.fromkeys(metrics, 0.0))
        for each in (experiment, start):
            self._writer.file_writer.add_summary(each)
        pairs: dict[str, list[str]] = {}
        for tag in metrics:
            name = tag.partition("/")[2].removeprefix("train_").removeprefix("val_")
            pairs.setdefault(name, []).append(tag)
        charts = {n: ["Multiline", tags] for n, tags in pairs.items() if len(tags) > 1}
        if charts:
            self._writer.add_custom_scalars({"train and validate": charts})


def import_writer(owner: str) -> Any:
    """Import torch's writer, and not TensorFlow with it: TensorBoard has all of it that it needs.

    Raises:
        ImportError: if tensorboard or torch is not installed.
    """
    compat = import_extra(owner, "tensorboard.compat", "callbacks")
    switch = f"{compat.__name__}.notf"  # TensorBoard's own
    if "tensorflow" not in sys.modules and switch not in sys.modules:
        sys.modules[switch] = types.ModuleType(switch)
        try:
            _ = compat.tf.io  # decides, for good
        finally:
            del sys.modules[switch]
    return import_extra(owner, "torch.utils.tensorboard", "callbacks")


def _is_judged(tag: str) -> bool:
    """Whether a tag is one of a metric, and not of a count."""
    kind, _, name = tag.partition("/")
    counts = ("epoch", NUM_SAMPLES, BATCH_COUNT)
    return kind in ("train", "validate") and name not in counts and not name.startswith("last_")


def write_scalars(
    writer: Any, values: Mapping[str, float], step: int | None, time_s: float | None = None
) -> None:
    """Write numbers, as of a time in seconds since the epoch, None for now."""
    for name, value in values.items():
        writer.add_scalar(name, value, step, walltime=time_s)
    writer.flush()
