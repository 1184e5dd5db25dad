"""TensorBoard."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from raysgd.callbacks.tensorboard import import_writer, write_scalars
from raysgd.callbacks.values import numbers_in
from raysgd.train.callbacks.callback import FileCallback
from raysgd.train.constants import PID, TIME_TOTAL_S, TIMESTAMP, TRAINING_ITERATION

__all__ = ["TBXLoggerCallback"]

_NOT_SHOWN = (PID, TIMESTAMP, TIME_TOTAL_S, TRAINING_ITERATION)


class TBXLoggerCallback(FileCallback):
    """Writes what ``tensorboard --logdir FOLDER`` shows of what one worker reports.

    Under ``ray/train/NAME``, over ``_training_iteration``: numbers as scalars, lists and arrays of
    numbers as histograms.

    Args:
        logdir: the folder; None for that of the run.
        worker_to_log: rank of the worker.

    Raises:
        ImportError: if tensorboard or torch, whose writer is used, is not installed.
    """

    def __init__(
        self, logdir: str | os.PathLike[str] | None = None, worker_to_log: int = 0
    ) -> None:
        super().__init__(logdir, worker_to_log)
        self._tensorboard = import_writer("TBXLoggerCallback")
        self._writer: Any = None

    def _begin(self, config: dict[str, Any]) -> None:
        self._writer = self._tensorboard.SummaryWriter(str(self.logdir))

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        """Write the numbers and the lists of numbers."""
        for result in results:
            step = result.get(TRAINING_ITERATION)
            shown = {"ray/train": {k: v for k, v in result.items() if k not in _NOT_SHOWN}}
            numbers = numbers_in(shown)
            for name, values in _arrays(shown).items():
                if name not in numbers:
                    self._writer.add_histogram(name, values, step)
            write_scalars(self._writer, numbers, step)

    def finish_training(self, error: bool = False, **info: Any) -> None:
        """Close the log."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _arrays(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the lists and arrays of numbers, flat and finite; of nested dicts as ``outer/inner``.

    An array of one is among them, though it counts as a number.
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found.update(_arrays(value, f"{name}/"))
        elif isinstance(value, list | tuple) or hasattr(value, "__array__"):
            with contextlib.suppress(TypeError, ValueError):  # of texts, or uneven
                array = np.asarray(value, dtype=float).ravel()
                if (finite := array[np.isfinite(array)]).size:
                    found[name] = finite
    return found
