"""MLflow."""

from __future__ import annotations

import os
from typing import Any

from raysgd.callbacks.lazy import import_for
from raysgd.callbacks.mlflow import (
    experiment_id,
    folders_allowed,
    log_config,
    name_for_mlflow,
)
from raysgd.callbacks.values import numbers_in
from raysgd.train.callbacks.files import FileCallback

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
        self._mlflow = import_for("MLflowLoggerCallback", "mlflow")
        self._uri = None if tracking_uri is None else os.fspath(tracking_uri)
        self._registry_uri = registry_uri
        self._experiment_id = experiment_id
        self._experiment_name = experiment_name or "raysgd"
        self._tags = dict(tags or {})
        self._save_artifact = save_artifact
        self._client: Any = None
        self.run_id: str | None = None
        """MLflow's id of the run; None before it has begun."""

    def start_training(
        self, logdir: str | os.PathLike[str], config: dict[str, Any], **info: Any
    ) -> None:
        """Begin a run."""
        super().start_training(logdir, config, **info)
        uri = self._uri
        if uri is None and "MLFLOW_TRACKING_URI" not in os.environ:
            uri = str(self.logdir / "mlruns")
        with folders_allowed(uri):
            client = self._mlflow.MlflowClient(uri, self._registry_uri)
            number = self._experiment_id
            if number is None:
                number = experiment_id(client, self._experiment_name)
            run_id: str = client.create_run(number, tags=self._tags).info.run_id
            log_config(client, run_id, config)
        self._client, self.run_id = client, run_id

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        """Write the numbers, over ``_training_iteration``."""
        for result in results:
            step = result.get("_training_iteration", 0)
            for name, value in numbers_in(result).items():
                self._client.log_metric(self.run_id, name_for_mlflow(name), value, step=step)

    def finish_training(self, error: bool = False, **info: Any) -> None:
        """End the run as finished, or as failed."""
        client, self._client = self._client, None
        if client is None:
            return
        if self._save_artifact:
            client.log_artifacts(self.run_id, str(self.logdir))
        client.set_terminated(self.run_id, "FAILED" if error else "FINISHED")
