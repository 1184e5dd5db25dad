"""Loggers of what the workers report. The writers are those of `raysgd.callbacks`."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from raysgd._internal.files import replacing
from raysgd._internal.imports import import_extra
from raysgd.callbacks.mlflow import MLflowRun
from raysgd.callbacks.tensorboard import TensorBoardWriter
from raysgd.callbacks.values import json_dict, numbers_in
from raysgd.train.callbacks.callback import FileCallback
from raysgd.train.constants import (
    PID,
    RESULT_FILE_JSON,
    TIME_TOTAL_S,
    TIMESTAMP,
    TRAINING_ITERATION,
)

__all__ = ["JsonLoggerCallback", "MLflowLoggerCallback", "TBXLoggerCallback"]

_NOT_SHOWN = (PID, TIMESTAMP, TIME_TOTAL_S, TRAINING_ITERATION)


class JsonLoggerCallback(FileCallback):
    """Writes ``results.json``: a list with, for each report, the list of the workers' results.

    The file is whole after each report, and a restored run adds to it. Values without a form in
    JSON are written as text.

    Args:
        logdir: the folder; None for that of the run.
        filename: name of the file; None for ``results.json``.
        workers_to_log: ranks of the workers whose results are written; None for all.
    """

    def __init__(
        self,
        logdir: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        workers_to_log: int | list[int] | None = 0,
    ) -> None:
        super().__init__(logdir, workers_to_log)
        self._filename = filename or RESULT_FILE_JSON

    def _begin(self, config: dict[str, Any]) -> None:
        rows = self._earlier_rows() if self._is_restored else []
        with replacing(self.log_path) as file:
            file.write(f"[{','.join(rows)}]".encode())

    def _earlier_rows(self) -> list[str]:
        """Return the whole lines of the file, without the comma or bracket at their ends."""
        if not self.log_path.exists():
            return []
        found = []
        for line in self.log_path.read_text(encoding="utf-8").splitlines()[1:]:
            with contextlib.suppress(ValueError):  # the process was killed while it wrote this line
                json.loads(line[:-1])
                found.append(f"\n{line[:-1]}")
        return found

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        """Add the results to the list."""
        text = json.dumps([json_dict(result, repr) for result in results])
        with self.log_path.open("rb+") as file:
            # over the bracket at the end, so that a long log costs no more than a short one
            end = file.seek(-1, os.SEEK_END)
            file.write(f"{',' if end > 1 else ''}\n{text}]".encode())

    @property
    def log_path(self) -> Path:
        """The file."""
        return self.logdir / self._filename


class MLflowLoggerCallback(FileCallback):
    """Writes a run of MLflow: the config as parameters, the numbers that one worker reports.

    Args:
        tracking_uri: a server, a database or a folder; None for what MLflow is set to, or, if that
            is nothing, ``mlruns`` in the folder of the run.
        registry_uri: where models are registered.
        experiment_id: of an existing experiment.
        experiment_name: of the experiment otherwise; it is made if it is missing.
        tags: of the run.
        save_artifact: whether to save the run's folder with it at the end.
        logdir: a folder; None for that of the run.
        worker_to_log: rank of the worker.

    Raises:
        ImportError: if mlflow is not installed.
    """

    def __init__(
        self,
        tracking_uri: str | os.PathLike[str] | None = None,
        registry_uri: str | None = None,
        experiment_id: str | None = None,
        experiment_name: str | None = None,
        tags: dict[str, str] | None = None,
        save_artifact: bool = False,
        logdir: str | os.PathLike[str] | None = None,
        worker_to_log: int = 0,
    ) -> None:
        super().__init__(logdir, worker_to_log)
        import_extra("MLflowLoggerCallback", "mlflow", "callbacks")
        self._tracking_uri = None if tracking_uri is None else os.fspath(tracking_uri)
        self._new: dict[str, Any] = {
            "registry_uri": registry_uri,
            "experiment_id": experiment_id,
            "experiment": experiment_name or "raysgd",
            "tags": tags,
        }
        self._save_artifact = save_artifact
        self._run: MLflowRun | None = None
        self.run_id: str | None = None
        """The MLflow id of the run; None before it has begun."""

    def _begin(self, config: dict[str, Any]) -> None:
        uri = self._tracking_uri
        if uri is None and "MLFLOW_TRACKING_URI" not in os.environ:
            uri = str(self.logdir / "mlruns")
        self._run = MLflowRun(uri, **self._new)
        self.run_id = self._run.id
        self._run.log_config(config)

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        """Write the numbers, over ``_training_iteration``."""
        assert self._run is not None
        for result in results:
            step = result.get(TRAINING_ITERATION, 0)
            self._run.log(numbers_in(result), step, time.time())

    def finish_training(self, error: bool = False, **info: Any) -> None:
        """End the run as finished, or as failed."""
        run, self._run = self._run, None
        if run is None:
            return
        if self._save_artifact:
            run.client.log_artifacts(run.id, str(self.logdir))
        run.end(error)


class TBXLoggerCallback(FileCallback):
    """Writes what ``tensorboard --logdir FOLDER`` shows of the reports of one worker.

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
        self._writer = TensorBoardWriter("TBXLoggerCallback")

    def _begin(self, config: dict[str, Any]) -> None:
        self._writer.open(self.logdir)

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        """Write the numbers and the lists of numbers."""
        for result in results:
            step = result.get(TRAINING_ITERATION)
            shown = {"ray/train": {k: v for k, v in result.items() if k not in _NOT_SHOWN}}
            self._writer.add_histograms(shown, step)
            self._writer.add_scalars(numbers_in(shown), step)

    def finish_training(self, error: bool = False, **info: Any) -> None:
        """Close the log."""
        self._writer.close()
