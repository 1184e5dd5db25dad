"""The callback that writes metrics to a CSV file."""

from __future__ import annotations

import codecs
import csv
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raysgd._internal.files import replacing
from raysgd.callbacks.base import LastCall, Trainer
from raysgd.callbacks.logger import LoggerCallback, end_line, folder_for, record_of
from raysgd.callbacks.values import plain_values


class CsvLogger(LoggerCallback):
    """Writes a row for each ``train()``, each ``validate()``, and each logged step.

    The columns are ``kind``, ``time``, ``seconds``, ``epoch``, ``global_step``, ``num_workers`` and
    the metrics. A new metric adds a column, and the file is rewritten. Rows are added to an
    existing file.

    Args:
        path: path of the file; None for ``metrics.csv`` in the trainer's ``logdir``.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._given = path
        self.needs_logdir = path is None

    def on_train_start(self, trainer: Trainer) -> None:
        super().on_train_start(trainer)
        path = self._path(trainer)
        path.parent.mkdir(parents=True, exist_ok=True)
        end_line(path)

    def log(self, trainer: Trainer, call: LastCall, metrics: dict[str, Any]) -> None:
        path, record = self._path(trainer), record_of(trainer, call)
        cells = {
            name: json.dumps(value) if isinstance(value, list) else value
            for name, value in plain_values(metrics).items()
        }
        row = {**record, **cells, **record}  # keep the order and the values of the record
        columns = _columns_of(path)
        if missing := [name for name in row if name not in columns]:
            columns += missing
            _rewrite(path, columns)
        with path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, columns).writerow(row)

    def _path(self, trainer: Trainer) -> Path:
        return folder_for(trainer, self._given, "metrics.csv")


def _columns_of(path: Path) -> list[str]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return next(csv.reader(file), [])


def _rewrite(path: Path, columns: Sequence[str]) -> None:
    with replacing(path) as file:
        writer = csv.DictWriter(codecs.getwriter("utf-8")(file), columns)
        writer.writeheader()
        if path.exists():
            with path.open(encoding="utf-8", newline="") as old:
                for row in csv.DictReader(old):  # a row may be cut off or too long
                    writer.writerow({name: row.get(name) or "" for name in columns})
