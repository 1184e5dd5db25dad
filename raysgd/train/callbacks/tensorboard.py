"""TensorBoard."""

from __future__ import annotations

import os
from typing import Any

from raysgd.callbacks.tensorboard import write_scalars
from raysgd.callbacks.values import numbers_in
from raysgd.imports import import_extra
from raysgd.train.callbacks.callback import FileCallback

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
        self._tensorboard = import_extra(
            "TBXLoggerCallback", "torch.utils.tensorboard", "callbacks"
        )
        self._writer: Any = None

    def _begin(self, config: dict[str, Any]) -> None:
        self._writer = self._tensorboard.SummaryWriter(str(self.logdir))

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        """Write the numbers, over ``_training_iteration``."""
        for result in results:
            step = result.get("_training_iteration")
            write_scalars(self._writer, numbers_in(result), step)

    def finish_training(self, error: bool = False, **info: Any) -> None:
        """Close the log."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
