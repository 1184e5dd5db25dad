"""TensorBoard."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from raysgd._internal.imports import import_extra
from raysgd.callbacks.base import LastCall, Trainer
from raysgd.callbacks.logger import LoggerCallback, folder_for, measured
from raysgd.callbacks.values import (
    json_dict,
    numbers_in,
    plain_values,
    scalars,
    shown_config,
    shown_repr,
)
from raysgd.elastic.events import Event
from raysgd.metrics import BATCH_COUNT, NUM_SAMPLES

__all__ = ["TensorBoardLogger", "TensorBoardWriter"]


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
        self._writer = TensorBoardWriter("TensorBoardLogger")
        self._folder = folder
        self.needs_logdir = folder is None
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
        writer.add_scalars(values, trainer.global_step, call.time)

    def log_event(self, trainer: Trainer, event: Event) -> None:
        """Write an event as text, and the number of workers that it left."""
        writer, step, time_s = self._opened(trainer), event.step, event.time
        ranks = ", ".join(map(str, event.ranks)) or "none"
        size = f"{event.num_workers} worker{'s' * (event.num_workers != 1)}"
        text = f"**{event.kind}**: ranks {ranks}; {size}\n\n{event.cause}"
        writer.summary_writer.add_text(f"events/{event.kind}", text, step, walltime=time_s)
        writer.add_scalars({"workers/num_workers": event.num_workers}, step, time_s)

    def close(self, trainer: Trainer) -> None:
        """Close the file."""
        if self._writer.is_open:
            self._describe(trainer)
            self._writer.summary_writer.file_writer.add_summary(self._end)
            self._writer.close()
        self._tags, self._has_described = set(), False

    def _opened(self, trainer: Trainer) -> TensorBoardWriter:
        if not self._writer.is_open:
            folder = folder_for(trainer, self._folder, "tensorboard")
            # hides the steps after the checkpoint, which a killed run has written
            self._writer.open(folder, self._began_at + 1)
            shown = json.dumps(json_dict(shown_config(trainer.config), shown_repr), indent=1)
            self._writer.summary_writer.add_text("config", f"```json\n{shown}\n```")
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
            self._writer.summary_writer.file_writer.add_summary(each)
        pairs: dict[str, list[str]] = {}
        for tag in metrics:
            name = tag.partition("/")[2].removeprefix("train_").removeprefix("val_")
            pairs.setdefault(name, []).append(tag)
        charts = {n: ["Multiline", tags] for n, tags in pairs.items() if len(tags) > 1}
        if charts:
            self._writer.summary_writer.add_custom_scalars({"train and validate": charts})


def _is_judged(tag: str) -> bool:
    """Whether a tag is one of a metric, and not of a count."""
    kind, _, name = tag.partition("/")
    counts = ("epoch", NUM_SAMPLES, BATCH_COUNT)
    return kind in ("train", "validate") and name not in counts and not name.startswith("last_")


class TensorBoardWriter:
    """Writes files that TensorBoard shows.

    Args:
        owner: name of the callback, for messages.

    Raises:
        ImportError: if tensorboard or torch is not installed.
    """

    def __init__(self, owner: str) -> None:
        _import_torch_writer(owner)
        self._owner = owner
        self.summary_writer: Any = None
        """The writer of torch; None if no file is open."""

    def open(self, folder: Path, purge_step: int | None = None) -> None:
        """Open a new file. TensorBoard hides what older files have from `purge_step` on."""
        module = _import_torch_writer(self._owner)
        self.summary_writer = module.SummaryWriter(str(folder), purge_step=purge_step)

    def add_scalars(
        self, values: Mapping[str, float], step: int | None, time_s: float | None = None
    ) -> None:
        """Write numbers, as of a time in seconds since the epoch; None for now."""
        for name, value in values.items():
            self.summary_writer.add_scalar(name, value, step, walltime=time_s)
        self.summary_writer.flush()

    def add_histograms(self, metrics: Mapping[str, Any], step: int | None) -> None:
        """Write the lists and arrays of numbers. An array of one is a scalar and is left out."""
        numbers = numbers_in(metrics)
        for name, values in plain_values(metrics).items():
            if name in numbers or not isinstance(values, list):
                continue
            with contextlib.suppress(TypeError, ValueError):  # of texts, or uneven
                array = np.asarray(values, dtype=float).ravel()
                if (finite := array[np.isfinite(array)]).size:
                    self.summary_writer.add_histogram(name, finite, step)

    @property
    def is_open(self) -> bool:
        """Whether a file is open."""
        return self.summary_writer is not None

    def close(self) -> None:
        """Close the file, if one is open."""
        if self.is_open:
            self.summary_writer.close()
            self.summary_writer = None


def _import_torch_writer(owner: str) -> Any:
    """Import ``torch.utils.tensorboard`` without TensorFlow, which it does not need."""
    compat = import_extra(owner, "tensorboard.compat", "callbacks")
    switch = f"{compat.__name__}.notf"  # a switch of TensorBoard
    if "tensorflow" not in sys.modules and switch not in sys.modules:
        sys.modules[switch] = types.ModuleType(switch)
        try:
            _ = compat.tf.io  # decides for the whole process
        finally:
            del sys.modules[switch]
    return import_extra(owner, "torch.utils.tensorboard", "callbacks")
