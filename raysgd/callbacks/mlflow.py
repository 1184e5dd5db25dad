"""MLflow."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

from raysgd.callbacks.base import LastCall, Trainer
from raysgd.callbacks.lazy import import_for
from raysgd.callbacks.logger import LoggerCallback
from raysgd.callbacks.values import numbers_in, scalars
from raysgd.elastic.events import Event

__all__ = [
    "MLflowLogger",
    "experiment_id",
    "folders_allowed",
    "log_config",
    "name_for_mlflow",
]

_ALLOW_FOLDERS = "MLFLOW_ALLOW_FILE_STORE"
_LONGEST_NAME = 240
"""Characters of a name: MLflow takes 250, and what takes the place of parts adds to it."""
_MOST_TEXT = 500
"""Characters that every MLflow server takes as the value of a parameter."""


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
        import_for("MLflowLogger", "mlflow")
        self._tracking_uri = None if tracking_uri is None else os.fspath(tracking_uri)
        self._experiment = experiment
        self._run_name = run_name
        self._tags = dict(tags or {})
        self._client: Any = None
        self._failed = False
        self._events: list[str] = []
        self.run_id: str | None = None
        """MLflow's id of the run; None before it has begun."""

    def log(self, trainer: Trainer, call: LastCall, metrics: dict[str, Any]) -> None:
        """Write the result of a call."""
        self._open(trainer)
        self._failed = False  # a call that failed before has been got over
        values = {f"{call.kind}/{name}": value for name, value in numbers_in(metrics).items()}
        values["workers/num_workers"] = trainer.num_workers
        entities = import_for("MLflowLogger", "mlflow.entities")
        time_ms, step = int(call.time * 1000), trainer.global_step
        self._client.log_batch(
            self.run_id,
            metrics=[
                entities.Metric(name_for_mlflow(name), float(value), time_ms, step)
                for name, value in values.items()
            ],
        )

    def log_event(self, trainer: Trainer, event: Event) -> None:
        """Write an event: the number of workers that it left, and what it was as a tag."""
        self._open(trainer)
        self._client.log_metric(
            self.run_id,
            "workers/num_workers",
            event.num_workers,
            timestamp=int(event.time * 1000),
            step=event.step,
        )
        told = {"kind": event.kind, "step": event.step, "ranks": list(event.ranks)}
        self._events = [*self._events[-19:], json.dumps(told)]
        self._client.set_tag(self.run_id, "raysgd.events", "\n".join(self._events))

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Remember how the run ends."""
        self._failed = True

    def close(self, trainer: Trainer) -> None:
        """End the run."""
        client, self._client = self._client, None
        if client is not None:
            client.set_terminated(self.run_id, "FAILED" if self._failed else "FINISHED")

    def state_dict(self) -> dict[str, Any]:
        """Return which run it is."""
        return {} if self.run_id is None else {"run_id": self.run_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with that run, unless another has begun."""
        if self._client is None:
            self.run_id = state.get("run_id", self.run_id)

    def _open(self, trainer: Trainer) -> None:
        """Begin the run; not before the trainer stands where it will go on from."""
        if self._client is not None:
            return
        mlflow = import_for("MLflowLogger", "mlflow")
        self._failed = False
        uri = self._tracking_uri
        with folders_allowed(uri):
            if is_folder(uri):
                # as it is MLflow would take a percent sign in it for the beginning of a code
                uri = Path(uri).expanduser().absolute().as_uri()
            client = mlflow.MlflowClient(tracking_uri=uri)
            if self.run_id is not None:
                client.update_run(self.run_id, status="RUNNING")
            else:
                number = experiment_id(client, self._experiment)
                run = client.create_run(number, run_name=self._run_name, tags=self._tags)
                self.run_id = run.info.run_id
                log_config(client, run.info.run_id, trainer.config)
        self._client = client


def is_folder(uri: str | None) -> TypeGuard[str]:
    """Whether a tracking URI is the path of a folder."""
    if uri is None or uri in ("databricks", "databricks-uc"):
        return False
    return "://" not in uri and not uri.startswith(("file:", "uc:"))


@contextmanager
def folders_allowed(uri: str | None) -> Iterator[None]:
    """Let MLflow write into a folder, which it wants to be asked for, if a folder was given."""
    if not (is_folder(uri) or (uri or "").startswith("file:")) or _ALLOW_FOLDERS in os.environ:
        yield
        return
    os.environ[_ALLOW_FOLDERS] = "true"
    try:
        yield
    finally:
        del os.environ[_ALLOW_FOLDERS]


def experiment_id(client: Any, name: str) -> str:
    """Return MLflow's id of an experiment, which is made if it is missing."""
    found = client.get_experiment_by_name(name)
    return str(found.experiment_id if found else client.create_experiment(name))


def log_config(client: Any, run_id: str, config: Mapping[str, Any]) -> None:
    """Write the numbers and texts in a config as the parameters of a run."""
    # MLflow refuses a second value, and two names may become one
    given = {name_for_mlflow(name): str(value) for name, value in scalars(config).items()}
    for name, value in given.items():
        client.log_param(run_id, name, value[:_MOST_TEXT])


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
