"""Where a callback writes, and whose results."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from raysgd.train.callbacks.callback import TrainingCallback
from raysgd.train.callbacks.preprocessors import IndexedResultsPreprocessor

__all__ = ["FileCallback"]


class FileCallback(TrainingCallback):
    """A callback that writes into a folder.

    Args:
        logdir: the folder; None for that of the run.
        workers: ranks of the workers whose results it gets; None for all.
    """

    def __init__(
        self, logdir: str | os.PathLike[str] | None, workers: int | list[int] | None
    ) -> None:
        self._given = logdir
        self._folder: Path | None = None
        self.results_preprocessor = IndexedResultsPreprocessor(workers)

    def start_training(
        self, logdir: str | os.PathLike[str], config: dict[str, Any], **info: Any
    ) -> None:
        """Make the folder."""
        self._folder = Path(self._given or logdir).expanduser()
        self._folder.mkdir(parents=True, exist_ok=True)

    @property
    def logdir(self) -> Path:
        """The folder.

        Raises:
            RuntimeError: before the first run, where none was given.
        """
        if self._folder is None:
            raise RuntimeError(f"{type(self).__name__} has no folder before a run has begun.")
        return self._folder
