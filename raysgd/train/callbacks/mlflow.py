"""MLflow."""

from __future__ import annotations

import os
import time
from typing import Any

from raysgd._internal.imports import import_extra
from raysgd.callbacks.mlflow import MLflowRun
from raysgd.callbacks.values import numbers_in
from raysgd.train.callbacks.callback import FileCallback

__all__ = ["MLflowLoggerCallback"]


class MLflowLoggerCallback(FileCallback):
    """Writes a run of MLflow: the config as parameters, the numbers that one worker reports.

    Args:
        tracking_uri: a server, a database or a folder; None for what MLflow is set to, or, if that
            is nothing, ``mlruns`` in the folder of the run.
        registry_uri: where models are registered.
        experiment_id: of an experiment that is there.
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
        """MLflow's id of the run; None before it has begun."""

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
            step = result.get("_training_iteration", 0)
            self._run.log(numbers_in(result), step, time.time())

    def finish_training(self, error: bool = False, **info: Any) -> None:
        """End the run as finished, or as failed."""
        run, self._run = self._run, None
        if run is None:
            return
        if self._save_artifact:
            run.client.log_artifacts(run.id, str(self.logdir))
        run.end(error)
