"""The callback for MLflow."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from raysgd._internal.imports import import_extra
from raysgd.callbacks.base import LastCall, Trainer
from raysgd.callbacks.logger import ServiceLogger, named_metrics
from raysgd.callbacks.values import scalars, shown_config
from raysgd.elastic.events import Event

_LONGEST_VALUE = 500
"""Maximum length of a parameter value that every MLflow server accepts."""


class MLflowLogger(ServiceLogger):
    """Writes a run of MLflow.

    Metrics are ``train/NAME`` and ``validate/NAME`` by step, and ``workers/num_workers``. The
    numbers and strings in the config are parameters.

    Args:
        tracking_uri: a server (``http://...``), a database, or a folder; None for the setting of
            MLflow (``MLFLOW_TRACKING_URI``).
        experiment: name of the experiment, which is created if it is missing.
        run_name: name of the run; None for a random one.
        tags: tags of the run.

    Raises:
        ImportError: if mlflow is not installed.
    """

    def __init__(
        self,
        tracking_uri: str | os.PathLike[str] | None = None,
        experiment: str = "raysgd",
        run_name: str | None = None,
        tags: dict[str, str] | None = None,
    ) -> None:
        import_extra("MLflowLogger", "mlflow", "callbacks")
        self._tracking_uri = None if tracking_uri is None else os.fspath(tracking_uri)
        self._new: dict[str, Any] = {
            "experiment": experiment,
            "run_name": run_name,
            "tags": dict(tags or {}),
        }

    def log(self, trainer: Trainer, call: LastCall, metrics: dict[str, Any]) -> None:
        super().log(trainer, call, metrics)
        values = named_metrics(trainer, call, metrics)
        self._opened(trainer).log(values, trainer.global_step, call.time)

    def log_event(self, trainer: Trainer, event: Event) -> None:
        values = {"workers/num_workers": event.num_workers}
        self._opened(trainer).log(values, event.step, event.time)

    def _open(self, trainer: Trainer) -> MLflowRun:
        is_new = self.run_id is None
        run = MLflowRun(self._tracking_uri, run_id=self.run_id, **self._new)
        self.run_id = run.id
        if is_new:
            run.log_config(trainer.config)
        return run

    def _end(self, run: MLflowRun, failed: bool) -> None:
        run.end(failed)


class MLflowRun:
    """A new MLflow run, or the existing run `run_id`."""

    def __init__(
        self,
        tracking_uri: str | None,
        *,
        run_id: str | None = None,
        registry_uri: str | None = None,
        experiment_id: str | None = None,
        experiment: str = "raysgd",
        run_name: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        from mlflow import MlflowClient

        if _is_folder(tracking_uri):
            # Pass a URI, because MLflow decodes percent signs in a path.
            tracking_uri = Path(tracking_uri).expanduser().absolute().as_uri()
        if tracking_uri is not None and tracking_uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self.client = client = MlflowClient(tracking_uri, registry_uri)
        if run_id is not None:
            client.update_run(run_id, status="RUNNING")
            self.id = run_id
            return
        if experiment_id is None:
            found = client.get_experiment_by_name(experiment)
            experiment_id = found.experiment_id if found else client.create_experiment(experiment)
        self.id = client.create_run(experiment_id, run_name=run_name, tags=tags).info.run_id

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Write the numbers and strings in a config as parameters."""
        # Use a dict, because two names may become one, and MLflow refuses a second value.
        given = {_allowed(name): value for name, value in scalars(shown_config(config)).items()}
        for name, value in given.items():
            self.client.log_param(self.id, name, str(value)[:_LONGEST_VALUE])

    def log(self, values: Mapping[str, float | int], step: int, time_s: float) -> None:
        """Write metrics with a time in seconds since the epoch."""
        from mlflow.entities import Metric

        metrics = [
            Metric(_allowed(name), float(value), int(time_s * 1000), step)
            for name, value in values.items()
        ]
        self.client.log_batch(self.id, metrics=metrics)

    def end(self, failed: bool) -> None:
        """End the run as finished or failed."""
        self.client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


def _is_folder(uri: str | None) -> TypeGuard[str]:
    if uri is None or uri in ("databricks", "databricks-uc"):
        return False
    return "://" not in uri and not uri.startswith(("file:", "uc:"))


def _allowed(name: str) -> str:
    """Return a name without characters that MLflow rejects, such as those in ``*batch_size``."""
    return re.sub(r"[^\w\-. /]", "_", name)
