"""The base classes of callbacks for training functions."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from raysgd._internal.paths import checked_path
from raysgd.train.callbacks.preprocessors import (
    ExcludedKeysResultsPreprocessor,
    IndexedResultsPreprocessor,
    ResultsPreprocessor,
)
from raysgd.train.constants import ALL_RESERVED_KEYS
from raysgd.train.result import REPORTS, read_reports

__all__ = ["FileCallback", "TrainingCallback"]


class TrainingCallback:
    """Receives what the workers report. Runs on the driver; override what you need."""

    results_preprocessor: ResultsPreprocessor | None = None
    """Preprocessor of the results that `handle_result` receives."""
    RESERVED_KEYS: Iterable[str] = ()
    """Names of reserved metrics that the callback receives, such as traces of
    `TorchWorkerProfiler`."""

    def start_training(
        self, logdir: str | os.PathLike[str], config: dict[str, Any] | None = None, **info: Any
    ) -> None:
        """Prepare for a run.

        Args:
            logdir: folder of the run.
            config: config of the training function.
            info: reserved.
        """

    def process_results(self, results: list[dict[str, Any]], **info: Any) -> None:
        """Preprocess the reports of all workers, by rank, and call `handle_result`."""
        hidden = ALL_RESERVED_KEYS.difference(self.RESERVED_KEYS)
        results = ExcludedKeysResultsPreprocessor(hidden).preprocess(results)
        if self.results_preprocessor is not None:
            results = self.results_preprocessor.preprocess(results)
        self.handle_result(results, **info)

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        """Handle preprocessed reports."""

    def finish_training(self, error: bool = False, **info: Any) -> None:
        """Handle the end of a run.

        Args:
            error: whether the run failed.
            info: reserved.
        """


class FileCallback(TrainingCallback):
    """Writes into a folder.

    Args:
        logdir: the folder; None for the folder of the run.
        workers: ranks of the workers whose results it gets; None for all.
    """

    logdir: Path
    """The folder of the callback. It exists from the first run on."""
    _subfolder = ""
    """Default folder, relative to the folder of the run."""

    def __init__(
        self, logdir: str | os.PathLike[str] | None, workers: int | list[int] | None
    ) -> None:
        self._given = logdir
        self.results_preprocessor = IndexedResultsPreprocessor(workers)

    def start_training(
        self, logdir: str | os.PathLike[str], config: dict[str, Any] | None = None, **info: Any
    ) -> None:
        self.logdir = checked_path("logdir", self._given or Path(logdir, self._subfolder))
        self.logdir.mkdir(parents=True, exist_ok=True)
        self._is_restored = bool(read_reports(Path(logdir, REPORTS)))
        self._begin(config or {})

    def _begin(self, config: dict[str, Any]) -> None:
        """Begin to write. The folder already exists."""
