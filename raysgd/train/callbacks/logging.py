"""Write reports of the workers to files and services, with the writers of `raysgd.callbacks`."""

import contextlib
import json
import os
import time
import zlib
from pathlib import Path
from typing import Any

from raysgd._internal.files import atomic_write
from raysgd._internal.imports import import_extra
from raysgd._internal.values import numbers_in, to_json_dict
from raysgd.callbacks.loggers import MLflowRun, absolute_uri, board_class
from raysgd.train import constants
from raysgd.train.callbacks.callback import FileCallback

__all__ = ["JsonLoggerCallback", "MLflowLoggerCallback", "TBXLoggerCallback"]

_NOT_SHOWN = (constants.TIMESTAMP, constants.TRAINING_ITERATION)


class JsonLoggerCallback(FileCallback):
    """Writes ``results.json``: a list with one list of the workers' results for each report.

    The file is valid JSON after each report, and a restored run appends to it. Values that JSON
    cannot represent are written as text. The default folder is the folder of the run.
    `workers_to_log=None` selects all workers.
    """

    def __init__(
        self,
        logdir: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        workers_to_log: int | list[int] | None = 0,
    ) -> None:
        super().__init__(logdir, workers_to_log)
        self._filename = filename or constants.RESULT_FILE_JSON

    def _begin(self, config: dict[str, Any]) -> None:
        rows = []
        if self._is_restored and self.log_path.exists():
            for line in self.log_path.read_text(encoding="utf-8").splitlines()[1:]:
                with contextlib.suppress(ValueError):  # the driver was killed while it wrote a line
                    json.loads(row := line[:-1])  # without the comma or bracket
                    rows.append(f"\n{row}")
        with atomic_write(self.log_path) as file:
            file.write(f"[{','.join(rows)}]".encode())

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        text = json.dumps([to_json_dict(result, repr) for result in results])
        with self.log_path.open("rb+") as file:
            end = file.seek(-1, os.SEEK_END)  # overwrite the closing bracket
            file.write(f"{',' if end > 1 else ''}\n{text}]".encode())

    @property
    def log_path(self) -> Path:
        return self.logdir / self._filename


class _ServiceCallback(FileCallback):
    """Logs the numbers that one worker reports to a run of a service."""

    _run: Any = None
    """A writer of `raysgd.callbacks.loggers`. `_begin` opens it."""
    _step = 0  # of the newest report

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        for result in results:
            self._log(result, result.get(constants.TRAINING_ITERATION, 0))

    def _log(self, metrics: dict[str, Any], step: int) -> None:
        self._step = step
        self._run.log(numbers_in(metrics), step, time.time())

    def finish_training(self, error: bool = False, **info: Any) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.end(error)


class MLflowLoggerCallback(_ServiceCallback):
    """Writes an MLflow run: the config as parameters, and the numbers that one worker reports.

    A restored run continues its MLflow run. Reports that a restart repeats are logged once.

    Args:
        tracking_uri: a server, a database, or a folder. The default is the URI in the settings of
            MLflow, needed in Tune. Without one, it is ``mlruns`` in the folder of the run.
        registry_uri: URI of the model registry.
        experiment_id: ID of an existing experiment.
        experiment_name: name of the experiment if there is no ID. MLflow creates a missing one.
        tags: tags of the run.
        save_artifact: whether to upload the folder of the run at the end.
        logdir: the folder; None for the folder of the run.
        worker_to_log: rank of the worker.
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
        self._tracking_uri = absolute_uri(tracking_uri)
        self._run_options: dict[str, Any] = {
            "registry_uri": registry_uri,
            "experiment_id": experiment_id,
            "experiment": experiment_name or "raysgd",
            "tags": tags,
        }
        self._save_artifact = save_artifact
        self.run_id: str | None = None
        """The MLflow ID of the run; None before it starts."""

    def _begin(self, config: dict[str, Any]) -> None:
        uri = self._tracking_uri
        if uri is None and "MLFLOW_TRACKING_URI" not in os.environ:
            uri = str(self.logdir / "mlruns")
        key = zlib.crc32(repr((uri, self._run_options)).encode())
        path = self.logdir / f"mlflow_run_{key:08x}"
        earlier = path.read_text() if self._is_restored and path.exists() else None
        self._run, self._step = MLflowRun(uri, run_id=earlier, **self._run_options), 0
        self.run_id = self._run.id
        if earlier is None:
            path.write_text(self.run_id)
            self._run.log_config(config)

    def _log(self, metrics: dict[str, Any], step: int) -> None:
        if not 0 < step <= self._step:  # a restart repeats reports, and MLflow replaces no value
            super()._log(metrics, step)

    def finish_training(self, error: bool = False, **info: Any) -> None:
        if self._save_artifact and self._run is not None:
            self._run.client.log_artifacts(self.run_id, str(self.logdir))
        super().finish_training(error)


class TBXLoggerCallback(_ServiceCallback):
    """Writes the reports of one worker for TensorBoard.

    Numbers become scalars. The tags are ``ray/train/NAME``, and the steps are
    ``_training_iteration``. The default folder is the folder of the run. Needs tensorboard and
    torch.
    """

    def __init__(
        self, logdir: str | os.PathLike[str] | None = None, worker_to_log: int = 0
    ) -> None:
        super().__init__(logdir, worker_to_log)
        self._new_board = board_class("TBXLoggerCallback")

    def _log(self, metrics: dict[str, Any], step: int) -> None:
        if self._run is None or 0 < step <= self._step:
            self.finish_training()
            # Hide later steps, which were reported after the checkpoint.
            self._run = self._new_board(str(self.logdir), purge_step=step)
        shown = {name: value for name, value in metrics.items() if name not in _NOT_SHOWN}
        super()._log({"ray/train": shown}, step)
