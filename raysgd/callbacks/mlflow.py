"""MLflow."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from raysgd._internal.imports import import_extra
from raysgd.callbacks.base import LastCall, Trainer
from raysgd.callbacks.logger import LoggerCallback, measured
from raysgd.callbacks.values import scalars, shown_config
from raysgd.elastic.events import Event

__all__ = ["MLflowLogger", "MLflowRun", "name_for_mlflow"]

_LONGEST_NAME = 240
"""Characters of a name: MLflow takes 250, and what takes the place of parts adds to it."""
_MOST_TEXT = 500
"""Characters that every MLflow server takes as the value of a parameter."""
_MOST_METRICS = 1000
"""Metrics that an MLflow server takes at once."""


class MLflowLogger(LoggerCallback):
    """Writes a run of MLflow.

    Metrics are ``train/NAME`` and ``validate/NAME`` over the training steps, and
    ``workers/num_workers``; the numbers and texts in the config are parameters, and the newest
    events are in the tag ``raysgd.events``. A run that is resumed from a checkpoint goes on with
    the same run of MLflow.

    Args:
        tracking_uri: a server (``http://...``), a database, or a folder; None for what MLflow is
            set to (``MLFLOW_TRACKING_URI``).
        experiment: name of the experiment; it is made if it is missing.
        run_name: name of the run; None for one that MLflow makes up.
        tags: of the run.

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
        self._run: MLflowRun | None = None
        self._failed = False
        self._events: list[str] = []
        self.run_id: str | None = None
        """MLflow's id of the run; None before it has begun."""

    def log(self, trainer: Trainer, call: LastCall, metrics: dict[str, Any]) -> None:
        """Write the result of a call."""
        run = self._opened(trainer)
        self._failed = False  # a call that failed before has been got over
        run.log(measured(trainer, call, metrics), trainer.global_step, call.time)

    def log_event(self, trainer: Trainer, event: Event) -> None:
        """Write an event: the number of workers that it left, and what it was as a tag."""
        run = self._opened(trainer)
        run.log({"workers/num_workers": event.num_workers}, event.step, event.time)
        told = {"kind": event.kind, "step": event.step, "ranks": list(event.ranks)}
        self._events = [*self._events[-19:], json.dumps(told)]
        run.client.set_tag(run.id, "raysgd.events", "\n".join(self._events))

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Remember how the run ends."""
        self._failed = True

    def close(self, trainer: Trainer) -> None:
        """End the run."""
        run, self._run = self._run, None
        if run is not None:
            run.end(self._failed)

    def state_dict(self) -> dict[str, Any]:
        """Return which run it is."""
        return {} if self.run_id is None else {"run_id": self.run_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with that run, unless another has begun."""
        if self._run is None:
            self.run_id = state.get("run_id")

    def _opened(self, trainer: Trainer) -> MLflowRun:
        """Return the run; it does not begin before the trainer stands where it will go on from."""
        if self._run is None:
            self._failed = False
            is_new = self.run_id is None
            self._run = MLflowRun(self._tracking_uri, run_id=self.run_id, **self._new)
            self.run_id = self._run.id
            if is_new:
                self._run.log_config(trainer.config)
        return self._run


class MLflowRun:
    """A run of MLflow, as the callbacks of both families write it; arguments are as theirs.

    It is a new one or, with a `run_id`, the one that is gone on with.
    """

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
            # a URI, because MLflow decodes percent signs in a path
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
        """Write the numbers and texts in a config as the parameters of the run."""
        # MLflow refuses a second value, and two names may become one
        shown = scalars(shown_config(config))
        given = {name_for_mlflow(name): str(value) for name, value in shown.items()}
        for name, value in given.items():
            self.client.log_param(self.id, name, value[:_MOST_TEXT])

    def log(self, values: Mapping[str, float | int], step: int, time_s: float) -> None:
        """Write metrics, as of a time in seconds since the epoch."""
        from mlflow.entities import Metric

        metrics = [
            Metric(name_for_mlflow(name), float(value), int(time_s * 1000), step)
            for name, value in values.items()
        ]
        for first in range(0, len(metrics), _MOST_METRICS):
            self.client.log_batch(self.id, metrics=metrics[first : first + _MOST_METRICS])

    def end(self, failed: bool) -> None:
        """End it as finished, or as failed."""
        self.client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


def _is_folder(uri: str | None) -> TypeGuard[str]:
    if uri is None or uri in ("databricks", "databricks-uc"):
        return False
    return "://" not in uri and not uri.startswith(("file:", "uc:"))


def name_for_mlflow(name: str) -> str:
    """Return a name with nothing in it that MLflow refuses.

    >>> name_for_mlflow("train/f1: cat")
    'train/f1_ cat'
    >>> name_for_mlflow("train/../f1//cat/")
    'train/_/f1/_/cat/_'
    """
    allowed = "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name[:_LONGEST_NAME])
    # MLflow wants a path that leads to no other place
    return "/".join("_" if part in ("", ".", "..") else part for part in allowed.split("/"))
