"""Loggers that write files, or to tracking services: TensorBoard, MLflow, Weights & Biases."""

from __future__ import annotations

import codecs
import csv
import dataclasses
import json
import os
import re
import sys
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from raysgd._internal.files import append_lines, atomic_write, complete_last_line
from raysgd._internal.imports import import_extra
from raysgd._internal.step_timing import PHASES
from raysgd._internal.values import flatten_scalars, numbers_in, redact_config, to_json_dict
from raysgd._internal.versions import versions
from raysgd.callbacks.base import AnyTrainer, CallInfo, LoggerCallback, logdir_of
from raysgd.elastic.events import Event
from raysgd.metrics import NUM_SAMPLES

_MAX_VALUE_LENGTH = 500
"""Maximum length of a parameter value that every MLflow server accepts."""
_MAX_TAG_LENGTH = 64  # in wandb


class JsonlLogger(LoggerCallback):
    """Writes ``metrics.jsonl`` and ``events.jsonl``. ``TorchTrainer(logdir=...)`` adds one logger.

    In ``metrics.jsonl``, a line of kind "run" describes each start: a ``fit()``, or else the first
    call::

        {"kind": "run", "time": ..., "operator": "Classifier", "device": "CPU",
         "versions": {"python": ..., "raysgd": ..., ...}, "config": {...}, "epoch": 0,
         "global_step": 0, "num_workers": 2, "min_workers": 1}
        {"kind": "train", "time": ..., "seconds": ..., "epoch": 1, "global_step": 31,
         "num_workers": 2, "metrics": {"train_loss": 0.5, ...}}

    ``fit(log_every=...)`` adds lines of kind "step". ``time`` is the end of the call in seconds
    since the Unix epoch. ``speed`` has the mean seconds per step of each phase by rank, such as
    ``{"data_s": [0.01, 0.02], ...}``. Numbers that are not finite are the strings "nan", "inf" and
    "-inf".
    ``events.jsonl`` has the fields of :class:`raysgd.elastic.events.Event`.
    """

    needs_logdir = True

    def on_train_start(self, trainer: AnyTrainer) -> None:
        run = {
            "kind": "run",
            "time": time.time(),
            "operator": trainer.operator_name,
            "device": "GPU" if getattr(trainer, "use_gpu", False) else "CPU",
            # Without installed libraries that the script does not use.
            "versions": {n: v for n, v in versions().items() if n == "python" or n in sys.modules},
            "config": to_json_dict(redact_config(trainer.config)),
            "epoch": trainer.epoch,
            "global_step": trainer.global_step,
            "num_workers": trainer.num_workers,
            "min_workers": trainer.min_workers,
        }
        append_lines(logdir_of(trainer) / "metrics.jsonl", [run])

    def log(self, trainer: AnyTrainer, call: CallInfo, metrics: dict[str, Any]) -> None:
        line = {**_common_fields(trainer, call), "metrics": flatten_scalars(metrics)}
        if call.speed:
            line["speed"] = call.speed
        append_lines(logdir_of(trainer) / "metrics.jsonl", [line])

    def on_event(self, trainer: AnyTrainer, event: Event) -> None:
        append_lines(logdir_of(trainer) / "events.jsonl", [dataclasses.asdict(event)])


class CsvLogger(LoggerCallback):
    """Writes ``metrics.csv``: a row for each ``train()``, ``validate()``, and logged step.

    The columns are ``kind``, ``time``, ``seconds``, ``epoch``, ``global_step``, ``num_workers`` and
    the metrics. A new metric adds a column, and the file is rewritten. Rows are added to an
    existing file.
    """

    needs_logdir = True

    def log(self, trainer: AnyTrainer, call: CallInfo, metrics: dict[str, Any]) -> None:
        path, record = logdir_of(trainer) / "metrics.csv", _common_fields(trainer, call)
        complete_last_line(path)
        row = {**record, **flatten_scalars(metrics), **record}  # keep the record's order and values
        with path.open(encoding="utf-8", newline="") as file:
            columns = next(csv.reader(file), [])
        if missing := [name for name in row if name not in columns]:
            columns += missing
            _rewrite(path, columns)
        with path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, columns).writerow(row)


def _rewrite(path: Path, columns: Sequence[str]) -> None:
    with atomic_write(path) as file:
        text = codecs.getwriter("utf-8")(file)
        writer = csv.DictWriter(text, columns, extrasaction="ignore")
        writer.writeheader()
        with path.open(encoding="utf-8", newline="") as old:
            writer.writerows(csv.DictReader(old))  # a row may be cut off or too long


def _common_fields(trainer: AnyTrainer, call: CallInfo) -> dict[str, Any]:
    """Return the fields that a log has for each call, in addition to the metrics."""
    record = {
        "kind": call.kind,
        "time": call.time,
        "seconds": call.seconds,
        "epoch": trainer.epoch,
        "global_step": trainer.global_step,
        "num_workers": trainer.num_workers,
    }
    return record if trainer.num_splits == 1 else {**record, "num_splits": trainer.num_splits}


class ServiceLogger(LoggerCallback):
    """Logs to a run of a tracking service. A resumed training continues the same run."""

    run_id: str | None = None
    """ID of the run. None before the run starts."""
    _chosen_id: str | None = None
    """ID that the user chose."""
    _run: Any = None
    _failed = False

    def _open(self, trainer: AnyTrainer) -> Any:
        """Start a run, or continue the run `run_id`. Set `run_id`.

        Return an object with ``log(values, step, time_s)`` and ``end(failed)``. The time is in
        seconds since the epoch.
        """
        raise NotImplementedError

    def _forget_run(self) -> None:
        ServiceLogger.load_state_dict(self, {})  # a subclass may need its own keys

    def _open_once(self, trainer: AnyTrainer) -> Any:
        """Return the run. The first record opens it, because loading a state can set `run_id`."""
        if self._run is None:
            self._failed = False
            self._run = self._open(trainer)
        return self._run

    def log(self, trainer: AnyTrainer, call: CallInfo, metrics: dict[str, Any]) -> None:
        self._failed = False  # training has continued after an exception
        numbers = numbers_in(metrics)
        values = {f"{call.kind}/{name}": value for name, value in numbers.items()}
        if call.speed:
            values |= {f"speed/{phase}_s": mean(call.speed[f"{phase}_s"]) for phase in PHASES}
        if NUM_SAMPLES in numbers and call.seconds > 0:
            values[f"speed/{call.kind}_samples_per_s"] = numbers[NUM_SAMPLES] / call.seconds
        values["workers/num_workers"] = trainer.num_workers
        self._open_once(trainer).log(values, trainer.global_step, call.time)

    def on_event(self, trainer: AnyTrainer, event: Event) -> None:
        values = {"workers/num_workers": event.num_workers}
        self._open_once(trainer).log(values, event.step, event.time)

    def on_exception(self, trainer: AnyTrainer, error: BaseException) -> None:
        self._failed = True

    def on_train_end(self, trainer: AnyTrainer) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.end(self._failed)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.run_id is None else {"run_id": self.run_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._run is None:
            self.run_id = self._chosen_id or state.get("run_id")


class TensorBoardLogger(ServiceLogger):
    """Writes files for ``tensorboard --logdir FOLDER``, in ``tensorboard`` in the ``logdir``.

    The scalars by step are ``train/NAME`` and ``validate/NAME`` for each metric, ``step/NAME`` with
    ``fit(log_every=...)``, ``workers/num_workers``, and ``speed/train_samples_per_s``. Events are
    texts, such as ``events/lost``, and so is the ``config``.

    Raises:
        ImportError: if tensorboard is not installed.
    """

    needs_logdir = True

    def __init__(self) -> None:
        self._new_board = board_class("TensorBoardLogger")

    def on_train_start(self, trainer: AnyTrainer) -> None:
        self._open_once(trainer)

    def _open(self, trainer: AnyTrainer) -> Any:
        folder = logdir_of(trainer) / "tensorboard"
        # Hide later steps, which were trained after the checkpoint.
        board = self._new_board(str(folder), purge_step=trainer.global_step + 1)
        shown = json.dumps(to_json_dict(redact_config(trainer.config)), indent=1)
        board.add_text("config", f"```json\n{shown}\n```")
        return board

    def on_event(self, trainer: AnyTrainer, event: Event) -> None:
        ranks = ", ".join(map(str, event.ranks)) or "none"
        text = f"**{event.kind}**: ranks {ranks}; {event.num_workers} workers\n\n{event.cause}"
        self._run.add_text(f"events/{event.kind}", text, event.step, walltime=event.time)
        super().on_event(trainer, event)


def board_class(owner: str) -> type[Any]:
    """Return the PyTorch writer for TensorBoard as a run. `owner` is the callback in errors."""
    import_extra(owner, "tensorboard", "callbacks")
    if "tensorflow" not in sys.modules:
        # Disable TensorFlow in TensorBoard: importing it takes seconds.
        sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("notf"))
    writer_cls: Any = import_extra(owner, "torch.utils.tensorboard", "callbacks").SummaryWriter

    class Board(writer_cls):  # type: ignore[misc]
        def log(self, values: Mapping[str, float], step: int, time_s: float) -> None:
            for name, value in values.items():
                self.add_scalar(name, value, step, walltime=time_s)
            self.flush()

        def end(self, failed: bool) -> None:
            self.close()

    return Board


class MLflowLogger(ServiceLogger):
    """Writes a run of MLflow.

    Metrics are ``train/NAME`` and ``validate/NAME`` by step, and ``workers/num_workers``. The
    numbers and strings in the config are parameters.

    Args:
        tracking_uri: a server (``http://...``), a database, or a folder; None for the setting of
            MLflow (``MLFLOW_TRACKING_URI``).
        experiment: name of the experiment, which is created if it is missing.
        run_name: name of the run; None for a random one.
        tags: tags of the run, in addition to ``trainer.provenance``, such as the commit.

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
        self._uri = absolute_uri(tracking_uri)
        self._names: dict[str, Any] = {"experiment": experiment, "run_name": run_name}
        self._tags = dict(tags or {})

    def _open(self, trainer: AnyTrainer) -> MLflowRun:
        is_new = self.run_id is None
        tags = {name: str(value)[:_MAX_VALUE_LENGTH] for name, value in trainer.provenance.items()}
        run = MLflowRun(self._uri, run_id=self.run_id, tags=tags | self._tags, **self._names)
        self.run_id = run.id
        if is_new:
            run.log_config(trainer.config)
        return run


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

        tracking_uri = absolute_uri(tracking_uri)
        if tracking_uri is not None and tracking_uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self.client = client = MlflowClient(tracking_uri, registry_uri)
        self._logged: dict[str, int] = {}  # newest step of each metric before the run continues
        self._continues = run_id is not None
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
        parameters = {_clean(name): v for name, v in flatten_scalars(redact_config(config)).items()}
        for name, value in parameters.items():
            self.client.log_param(self.id, name, str(value)[:_MAX_VALUE_LENGTH])

    def log(self, values: Mapping[str, float | int], step: int, time_s: float) -> None:
        """Write metrics with a time in seconds since the epoch.

        Leave out steps that the run has from before it continued, because MLflow replaces none.
        """
        from mlflow.entities import Metric

        names = {_clean(name): float(value) for name, value in values.items()}
        for name in names.keys() - self._logged if self._continues else ():
            history = self.client.get_metric_history(self.id, name)
            self._logged[name] = max((each.step for each in history), default=-1)
        new = {name: value for name, value in names.items() if step > self._logged.get(name, -1)}
        metrics = [Metric(name, value, int(time_s * 1000), step) for name, value in new.items()]
        self.client.log_batch(self.id, metrics=metrics)

    def end(self, failed: bool) -> None:
        """End the run as finished or failed."""
        self.client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


def absolute_uri(uri: str | os.PathLike[str] | None) -> str | None:
    """Return the URI of a folder, which does not depend on the current one, or another URI."""
    text = "" if uri is None else os.fspath(uri)
    if re.match(r"[^/]+://|file:|uc:|databricks(-uc)?$|$", text):
        return text or None
    # MLflow decodes percent signs in a path, but not in a URI.
    return Path(text).expanduser().absolute().as_uri()


def _clean(name: str) -> str:
    """Return a name without characters that MLflow rejects, such as those in ``*batch_size``."""
    return re.sub(r"[^\w\-. /]", "_", name)


class WandbLogger(ServiceLogger):
    """Writes a run of Weights & Biases.

    Metrics are ``train/NAME`` and ``validate/NAME`` by ``global_step``, ``workers/num_workers``,
    and the kinds of events, ``event``.

    Args:
        project: name of the project.
        arguments: further arguments of ``wandb.init``, such as ``mode="offline"``. The default of
            ``dir`` is the trainer's ``logdir``.

    Raises:
        ImportError: if wandb is not installed.
    """

    def __init__(self, project: str = "raysgd", **arguments: Any) -> None:
        import_extra("WandbLogger", "wandb", "callbacks")
        self._arguments = {"project": project, **arguments}
        self.run_id = self._chosen_id = arguments.get("id")

    def on_event(self, trainer: AnyTrainer, event: Event) -> None:
        values = {"event": event.kind, "workers/num_workers": event.num_workers}
        self._open_once(trainer).log(values, event.step, event.time)

    def _open(self, trainer: AnyTrainer) -> Any:
        import wandb

        arguments = {
            "config": to_json_dict(redact_config(trainer.config)),
            "reinit": "create_new",  # otherwise wandb returns the process's open run
            "dir": None if trainer.logdir is None else str(logdir_of(trainer)),
            **self._arguments,
        }
        tags = [f"{name}: {value}"[:_MAX_TAG_LENGTH] for name, value in trainer.provenance.items()]
        arguments["tags"] = [*tags, *(arguments.get("tags") or ())]
        if self.run_id is not None:
            arguments |= {"id": self.run_id, "resume": "allow"}
        run = wandb.init(**arguments)
        self.run_id = run.id
        # Steps in wandb cannot decrease, but a restart from a snapshot repeats steps.
        run.define_metric("*", step_metric="global_step")
        return types.SimpleNamespace(
            log=lambda values, step, time_s: run.log({**values, "global_step": step}),
            end=lambda failed: run.finish(exit_code=int(failed)),
        )
