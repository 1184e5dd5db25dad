"""The base classes of callbacks for training functions, and the code that calls callbacks."""

import contextlib
import functools
import inspect
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from raysgd._internal.paths import as_path
from raysgd.train.callbacks.results_preprocessors import (
    ExcludedKeysResultsPreprocessor,
    IndexedResultsPreprocessor,
    ResultsPreprocessor,
)
from raysgd.train.constants import ALL_RESERVED_KEYS
from raysgd.train.result import REPORTS, read_reports

logger = logging.getLogger(__name__)


class TrainingCallback:
    """Receives the reports of the workers, on the driver. Override the methods that you need."""

    results_preprocessor: ResultsPreprocessor | None = None
    """Preprocessor of the results that `handle_result` receives."""
    RESERVED_KEYS: Iterable[str] = ()
    """Names of reserved metrics that the callback receives, such as traces of
    `TorchWorkerProfiler`."""

    def start_training(
        self, logdir: str | os.PathLike[str], config: dict[str, Any] | None = None, **info: Any
    ) -> None:
        """Prepare for a run in the folder `logdir`."""

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
        """Handle the end of a run. `error` is whether the run failed."""


class FileCallback(TrainingCallback):
    """Writes the reports of some workers into a folder."""

    logdir: Path
    """The folder of the callback. It exists from the first run on."""
    _subfolder = ""
    """Default folder, relative to the folder of the run."""

    def __init__(
        self,
        logdir: str | os.PathLike[str] | None = None,
        workers_to_log: int | list[int] | None = None,
    ) -> None:
        self._chosen_folder = logdir
        self.results_preprocessor = IndexedResultsPreprocessor(workers_to_log)

    def start_training(
        self, logdir: str | os.PathLike[str], config: dict[str, Any] | None = None, **info: Any
    ) -> None:
        self.logdir = as_path("logdir", self._chosen_folder or Path(logdir, self._subfolder))
        self.logdir.mkdir(parents=True, exist_ok=True)
        # A folder of its own belongs to one run or trial.
        self._is_restored = not self._chosen_folder or bool(read_reports(Path(logdir, REPORTS)))
        self._begin(config or {})

    def _begin(self, config: dict[str, Any]) -> None:
        """Begin to write. The folder exists."""


class TrainingCallbackList:
    """Calls the callbacks of one run."""

    def __init__(self, callbacks: Sequence[Any] | None) -> None:
        self._callbacks = [] if callbacks is None else callbacks
        is_list = isinstance(self._callbacks, Sequence)
        if not is_list or not all(isinstance(c, TrainingCallback) for c in self._callbacks):
            raise TypeError(
                f"callbacks={callbacks!r}: must be a list of TrainingCallbacks. In place of one "
                "of Ray, such as TuneReportCallback, write a TrainingCallback with handle_result."
            )

    @contextlib.contextmanager
    def run(self, logdir: Path, config: dict[str, Any]) -> Iterator[None]:
        """Start the callbacks. At the end, finish the started callbacks in reverse order."""
        with contextlib.ExitStack() as started:
            for callback in self._callbacks:
                started.push(functools.partial(_finish, callback))
                parameters = inspect.signature(callback.start_training).parameters
                takes_any = any(each.kind == each.VAR_KEYWORD for each in parameters.values())
                # Callbacks for Ray 1.9 take no config.
                others = {"config": config} if takes_any or "config" in parameters else {}
                callback.start_training(logdir=str(logdir), **others)
            yield

    def handle(self, results: list[dict[str, Any]]) -> None:
        """Pass copies of the results to each callback."""
        for callback in self._callbacks:
            callback.process_results([dict(result) for result in results])


def _finish(callback: TrainingCallback, error: type[BaseException] | None, *_: object) -> None:
    try:
        callback.finish_training(error=error not in (None, GeneratorExit))
    except Exception:
        if error is None:
            raise
        logger.exception("%s.finish_training failed.", type(callback).__name__)
