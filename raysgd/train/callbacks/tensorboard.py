"""TensorBoard."""

from __future__ import annotations

import os
from typing import Any

from raysgd.callbacks.lazy import import_for
from raysgd.callbacks.values import numbers_in
from raysgd.train.callbacks.files import FileCallback

__all__ = ["TBXLoggerCallback"]


class TBXLoggerCallback(FileCallback):
    """Writes what ``tensorboard --logdir FOLDER`` shows: the numbers that one worker reports.

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
        self._tensorboard = import_for("TBXLoggerCallback", "torch.utils.tensorboard")
        self._writer: Any = None

    def start_training(
        self, logdir: str | os.PathLike[str], config: dict[str, Any], **info: Any
    ) -> None:
        """Open the log."""
        super().start_training(logdir, config, **info)
        self._writer = self._tensorboard.SummaryWriter(str(self.logdir))

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        """Write the numbers, over ``_training_iteration``."""
        for result in results:
            step = result.get("_training_iteration")
            for name, value in numbers_in(result).items():
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish_training(self, error: bool = False, **info: Any) -> None:
        """Close the log."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
