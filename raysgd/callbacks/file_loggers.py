"""Loggers that write files: JSON lines, which other tools can read, and a table."""

from __future__ import annotations

import codecs
import csv
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raysgd._internal.files import replacing
from raysgd._internal.values import json_dict, redact_config, scalars
from raysgd._internal.versions import versions
from raysgd.callbacks.base import (
    LastCall,
    LoggerCallback,
    Trainer,
    append_lines,
    complete_last_line,
    logdir_of,
)
from raysgd.elastic.events import Event


class JsonlLogger(LoggerCallback):
    """Writes ``metrics.jsonl`` and ``events.jsonl``. ``TorchTrainer(logdir=...)`` adds one logger.

    In ``metrics.jsonl``, a line of kind "run" describes each start: a ``fit()``, or else the first
    call::

        {"kind": "run", "time": ..., "operator": "Classifier", "device": "CPU",
         "versions": {"python": ..., "raysgd": ..., ...}, "config": {...}, "epoch": 0,
         "global_step": 0, "num_workers": 2, "min_workers": 1}
        {"kind": "train", "time": ..., "seconds": ..., "epoch": 1, "global_step": 31,
         "num_workers": 2, "metrics": {"train_loss": 0.5, ...}}

    ``fit(log_every=...)`` adds lines of kind "step". ``time`` is the end of the call in seconds
    since the Unix epoch. ``speed`` has the mean seconds per step of each phase by rank, such as
    ``{"data_s": [0.01, 0.02], ...}``. Numbers that are not finite are the strings "nan", "inf" and
    "-inf".
    ``events.jsonl`` has the fields of :class:`raysgd.elastic.events.Event`.
    """

    needs_logdir = True

    def on_train_start(self, trainer: Trainer) -> None:
        run = {
            "kind": "run",
            "time": time.time(),
            "operator": trainer.operator_name,
            "device": "GPU" if getattr(trainer, "use_gpu", False) else "CPU",
            # Without installed libraries that the script does not use.
            "versions": {n: v for n, v in versions().items() if n == "python" or n in sys.modules},
            "config": json_dict(redact_config(trainer.config)),
            "epoch": trainer.epoch,
            "global_step": trainer.global_step,
            "num_workers": trainer.num_workers,
            "min_workers": trainer.min_workers,
        }
        append_lines(logdir_of(trainer) / "metrics.jsonl", [run])

    def log(self, trainer: Trainer, call: LastCall, metrics: dict[str, Any]) -> None:
        line = {**_common_fields(trainer, call), "metrics": scalars(metrics)}
        if call.speed:
            line["speed"] = call.speed
        append_lines(logdir_of(trainer) / "metrics.jsonl", [line])

    def on_event(self, trainer: Trainer, event: Event) -> None:
        append_lines(logdir_of(trainer) / "events.jsonl", [dataclasses.asdict(event)])


class CsvLogger(LoggerCallback):
    """Writes ``metrics.csv``: a row for each ``train()``, ``validate()``, and logged step.

    The columns are ``kind``, ``time``, ``seconds``, ``epoch``, ``global_step``, ``num_workers`` and
    the metrics. A new metric adds a column, and the file is rewritten. Rows are added to an
    existing file.
    """

    needs_logdir = True

    def log(self, trainer: Trainer, call: LastCall, metrics: dict[str, Any]) -> None:
        path, record = logdir_of(trainer) / "metrics.csv", _common_fields(trainer, call)
        complete_last_line(path)
        row = {**record, **scalars(metrics), **record}  # keep the record's order and values
        with path.open(encoding="utf-8", newline="") as file:
            columns = next(csv.reader(file), [])
        if missing := [name for name in row if name not in columns]:
            columns += missing
            _rewrite(path, columns)
        with path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, columns).writerow(row)


def _rewrite(path: Path, columns: Sequence[str]) -> None:
    with replacing(path) as file:
        writer = csv.DictWriter(codecs.getwriter("utf-8")(file), columns)
        writer.writeheader()
        with path.open(encoding="utf-8", newline="") as old:
            for row in csv.DictReader(old):  # a row may be cut off or too long
                writer.writerow({name: row.get(name) or "" for name in columns})


def _common_fields(trainer: Trainer, call: LastCall) -> dict[str, Any]:
    """Return the fields that a log has for each call, in addition to the metrics."""
    record = {
        "kind": call.kind,
        "time": call.time,
        "seconds": call.seconds,
        "epoch": trainer.epoch,
        "global_step": trainer.global_step,
        "num_workers": trainer.num_workers,
    }
    return record if trainer.split == 1 else {**record, "split": trainer.split}
