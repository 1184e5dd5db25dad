"""What a callback of a training function can do."""

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

__all__ = ["FileCallback", "TrainingCallback", "visible"]


def visible(callback: Any, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return results without the reserved metrics that the callback does not ask for."""
    hidden = ALL_RESERVED_KEYS.difference(getattr(callback, "RESERVED_KEYS", ()))
    return ExcludedKeysResultsPreprocessor(hidden).preprocess(results)


class TrainingCallback:
    """Sees what the workers report. Runs on the driver; override what you need."""

    results_preprocessor: ResultsPreprocessor | None = None
    """Applied to results before `handle_result` gets them."""
    RESERVED_KEYS: Iterable[str] = ()
    """Names of reserved metrics that the callback gets, such as traces of `TorchWorkerProfiler`."""

    def start_training(
        self, logdir: str | os.PathLike[str], config: dict[str, Any] | None = None, **info: Any
    ) -> None:
        """Called as a run begins.

        Args:
            logdir: folder of the run.
            config: what the function is given.
            info: for what may be added later.
        """

    def process_results(self, results: list[dict[str, Any]], **info: Any) -> None:
        """Called with what the workers reported, by rank; hands it, preprocessed, on."""
        results = visible(self, results)
        if self.results_preprocessor is not None:
            results = self.results_preprocessor.preprocess(results)
        self.handle_result(results, **info)

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        """Called with what the workers reported, by rank, after preprocessing."""

    def finish_training(self, error: bool = False, **info: Any) -> None:
        """Called when a run has ended.

        Args:
            error: whether it has failed.
            info: for what may be added later.
        """


class FileCallback(TrainingCallback):
    """A callback that writes into a folder.

    Args:
        logdir: the folder; None for that of the run.
        workers: ranks of the workers whose results it gets; None for all.
    """

    _subfolder = ""
    """Where it writes in the folder of the run."""

    def __init__(
        self, logdir: str | os.PathLike[str] | None, workers: int | list[int] | None
    ) -> None:
        self._given = logdir
        self._folder: Path | None = None
        self._is_restored = False
        self.results_preprocessor = IndexedResultsPreprocessor(workers)

    def start_training(
        self, logdir: str | os.PathLike[str], config: dict[str, Any] | None = None, **info: Any
    ) -> None:
        """Make the folder, and begin."""
        self._folder = checked_path("logdir", self._given or Path(logdir, self._subfolder))
        self._folder.mkdir(parents=True, exist_ok=True)
        self._is_restored = bool(read_reports(Path(logdir, REPORTS)))
        self._begin(config or {})

    def _begin(self, config: dict[str, Any]) -> None:
        """Begin to write, once the folder is there."""

    @property
    def logdir(self) -> Path:
        """The folder.

        Raises:
            RuntimeError: before the first run, where none was given.
        """
        if self._folder is None:
            raise RuntimeError(f"{type(self).__name__} has no folder before a run has begun.")
        return self._folder
