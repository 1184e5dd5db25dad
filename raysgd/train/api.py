"""What a training function calls: its place among the workers, its reports and checkpoints."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raysgd._internal.context import WorkerContext
from raysgd.train.checkpoint import Checkpoint
from raysgd.train.preemption import PreemptionInfo, agreed
from raysgd.train.session import Session, announced_preemption, current, worker_context
from raysgd.train.uploads import ReportOptions
from raysgd.train.validation import CheckpointConsistencyMode, ReportedCheckpoint

__all__ = [
    "TrainContext",
    "get_all_reported_checkpoints",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "get_preemption_info",
    "load_checkpoint",
    "local_rank",
    "report",
    "save_checkpoint",
    "world_rank",
    "world_size",
]

_WARNED: set[str] = set()


def _within_run(name: str) -> Session | None:
    """Return the session; without one warn, once for each function.

    Raises:
        RuntimeError: in a thread that is older than the run, such as one of a run before.
    """
    session = current()
    if session is None and name not in _WARNED:
        _WARNED.add(name)
        warnings.warn(
            f"raysgd.train.{name}() does nothing here: it is meant for a training function, which "
            "a Trainer runs on its workers.",
            stacklevel=3,
        )
    if session is not None and session.is_foreign_thread:
        raise RuntimeError(
            f"raysgd.train.{name}() was called in a thread, {threading.current_thread().name!r}, "
            "that was started before this training function, as by a run before it. Start the "
            "threads that report in the function, and join them before it returns."
        )
    return session


def report(
    metrics: Mapping[str, Any] | None = None,
    /,
    checkpoint: Checkpoint | None = None,
    **named: Any,
) -> None:
    """Report metrics from a training function, on every worker and equally often.

    Both ways of writing it are taken: ``report(loss=0.1, epoch=1)``, and ``report({"loss": 0.1},
    checkpoint=...)``. Returns at once unless the report before has not been taken yet, which is so
    while another worker is slower; with a checkpoint it returns when that is safe. ``_timestamp``
    (whole seconds since the epoch), ``_time_this_iter_s`` (unless you report it yourself) and
    ``_training_iteration`` (from 1) are added.
    Outside of a run it warns once and does nothing.

    Args:
        metrics: anything that can be pickled, by name. As a keyword, ``metrics=`` with a dict
            means the same where it is the only one.
        checkpoint: a :class:`Checkpoint`, from worker 0 or from all; that of the lowest rank is
            kept.
        named: the metrics themselves. Beside a dict of metrics, these five are none, but options
            of today's Ray Train: ``checkpoint_upload_mode``, a :class:`CheckpointUploadMode`;
            ``checkpoint_upload_fn(checkpoint, name)``, which returns the checkpoint from where it
            has put it, and with ASYNC runs beside the function; ``checkpoint_dir_name``, that
            name; ``delete_local_checkpoint_after_upload``, by default with ASYNC alone; and
            ``validation``, True or a :class:`ValidationTaskConfig`, to validate the checkpoint as
            the trainer's :class:`ValidationConfig` says.

    Raises:
        TypeError: if `metrics` is no dict, `checkpoint` no Checkpoint, or `validation` none of the
            two, or something cannot be pickled.
        ValueError: if an option has a value that is not allowed.
    """
    known = ReportOptions.names()
    if (
        metrics is None
        and isinstance(named.get("metrics"), Mapping)
        and named.keys() <= {"metrics", *known}
    ):
        metrics = named.pop("metrics")
        if checkpoint is None and not named and "metrics" not in _WARNED and world_rank() == 0:
            _WARNED.add("metrics")
            warnings.warn(
                "report(metrics={...}) reports each entry of the dict as a metric. Ray 1.13 "
                "reported one metric called 'metrics'. For that, write report({'metrics': {...}}); "
                "to get no warning, write report({...}).",
                stacklevel=2,
            )
    if metrics is not None and not isinstance(metrics, Mapping):
        raise TypeError(f"report({metrics!r}): takes a dict, or metrics by name: report(loss=0.1).")
    if checkpoint is not None and not hasattr(checkpoint, "to_directory"):
        if metrics is not None:
            raise TypeError(
                f"report(..., checkpoint={checkpoint!r}): must be a Checkpoint, such as "
                "Checkpoint.from_dict({...}). To save values, call save_checkpoint(name=value)."
            )
        # by name alone it is a metric like any other
        checkpoint, named = None, {"checkpoint": checkpoint, **named}
    options: dict[str, Any] = {}
    if metrics is not None:  # without, all names are those of metrics
        options = {name: named.pop(name) for name in known & named.keys()}
    given = ReportOptions(**options)
    session = _within_run("report")
    if session is not None:
        session.report({**(metrics or {}), **named}, checkpoint, given)


def save_checkpoint(**state: Any) -> None:
    """Save a checkpoint, on every worker and equally often; that of worker 0 is kept.

    Returns when the driver has it, so that it survives whatever happens to workers from then on.
    ``_timestamp`` (whole seconds since the epoch) is added. Tensors of a GPU are read back on the
    CPU, and of a DistributedDataParallel the model in it. Outside of a run it warns once and does
    nothing.

    Args:
        state: anything that can be pickled, by name; `load_checkpoint` returns it as a dict.

    Raises:
        TypeError: if it cannot be pickled.
    """
    session = _within_run("save_checkpoint")
    if session is not None:
        session.save(state)


def load_checkpoint() -> dict[str, Any] | None:
    """Return the newest checkpoint as a dict: of this run, or the one that it was started with.

    None where there is none. Outside of a run it warns once and returns None.
    """
    session = _within_run("load_checkpoint")
    checkpoint = None if session is None else session.load()
    return None if checkpoint is None else checkpoint.to_dict()


def get_checkpoint() -> Checkpoint | None:
    """Return the newest checkpoint as a :class:`Checkpoint`, or None, as `load_checkpoint` does."""
    session = _within_run("get_checkpoint")
    return None if session is None else session.load()


def get_all_reported_checkpoints(
    consistency_mode: Any = CheckpointConsistencyMode.VALIDATED, timeout_s: float | None = None
) -> list[ReportedCheckpoint]:
    """Return the checkpoints of the run that are on disk, the oldest first.

    Waits until the driver has dealt with all that this worker has reported, for which the other
    workers have to report as well. Outside of a run it warns once and returns none; there are none
    in a trial of Tune, which keeps them itself.

    Args:
        consistency_mode: a :class:`CheckpointConsistencyMode`, ours or Ray's: whether to wait for
            validations, too.
        timeout_s: how long to wait, in seconds; what is there then is returned. None for as long
            as it takes.
    """
    mode = CheckpointConsistencyMode(getattr(consistency_mode, "value", consistency_mode))
    session = _within_run("get_all_reported_checkpoints")
    if session is None:
        return []
    return session.reported_checkpoints(mode is CheckpointConsistencyMode.VALIDATED, timeout_s)


def _worker_context() -> WorkerContext:
    return worker_context() or WorkerContext()


def world_rank() -> int:
    """Return this worker's rank among all, from 0; 0 outside of a worker."""
    return _worker_context().world_rank


def local_rank() -> int:
    """Return this worker's rank among those on its node, from 0; 0 outside of a worker."""
    return _worker_context().local_rank


def world_size() -> int:
    """Return the number of workers; 1 outside of a worker. It changes only with a restart."""
    return _worker_context().world_size


def get_dataset_shard(dataset_name: str | None = None) -> Any:
    """Return this worker's part of a data set that the trainer was given.

    It stays the same over restarts with as many workers; with others it is shared out anew.
    Outside of a run, and where the trainer was given no data set, it warns once and returns None.

    Args:
        dataset_name: which one, where the trainer was given several by name.

    Raises:
        RuntimeError: if the name is missing although there are several data sets.
        KeyError: if none of them has that name.
    """
    session = _within_run("get_dataset_shard")
    if session is None:
        return None
    shards = session.shards
    if shards is None:
        warnings.warn(
            "get_dataset_shard() returns None, because the trainer was given no data set.",
            stacklevel=2,
        )
    if not isinstance(shards, dict):
        return shards
    names = ", ".join(map(repr, shards))
    if dataset_name is None:
        raise RuntimeError(
            "get_dataset_shard() needs the name of one of the data sets that the trainer was "
            f"given: {names}."
        )
    if dataset_name not in shards:
        raise KeyError(f"get_dataset_shard({dataset_name!r}): the trainer was given {names}.")
    return shards[dataset_name]


def get_preemption_info() -> PreemptionInfo | None:
    """Return which workers are going to be taken away, as was announced; None where none is.

    All workers must call it equally often, and get the same: what worker 0 knows, by torch's
    processes. Without these each knows it within a second or two of the others. Save what you have
    with `report` then: the function is restarted elsewhere from its newest checkpoint, which costs
    nothing just after one. Outside of a run it warns once and returns None.
    """
    return None if _within_run("get_preemption_info") is None else agreed(announced_preemption())


@dataclass(frozen=True)
class TrainContext:
    """This worker's place, as `get_context` returns it; the defaults hold outside of a worker."""

    worker: WorkerContext = field(default_factory=WorkerContext)
    local_world_size: int = 1
    metadata: Mapping[str, Any] = field(default_factory=dict)
    experiment: Mapping[str, str] = field(default_factory=dict)

    def get_world_size(self) -> int:
        """Return the number of workers."""
        return self.worker.world_size

    def get_world_rank(self) -> int:
        """Return the rank among all workers."""
        return self.worker.world_rank

    def get_local_rank(self) -> int:
        """Return the rank among the workers of this node."""
        return self.worker.local_rank

    def get_local_world_size(self) -> int:
        """Return the number of workers on this node."""
        return self.local_world_size

    def get_node_rank(self) -> int:
        """Return the rank of this node among those that have workers."""
        return self.worker.node_rank

    def get_metadata(self) -> dict[str, Any]:
        """Return the trainer's ``metadata``."""
        return dict(self.metadata)

    def get_experiment_name(self) -> str:
        """Return the name of the run."""
        return self.experiment.get("name", "")

    def get_trial_name(self) -> str:
        """Return the name of the trial; of the run where there is no search."""
        return self.experiment.get("trial_name", self.get_experiment_name())

    def get_trial_id(self) -> str:
        """Return the id of the trial; the name of the run where there is no search."""
        return self.experiment.get("trial_id", self.get_experiment_name())

    def get_trial_dir(self) -> str:
        """Return the folder of the run on the driver's node."""
        return self.experiment.get("dir", "")

    def get_storage(self) -> str:
        """Return where the run is kept: the same as `get_trial_dir`."""
        return self.get_trial_dir()


def get_context() -> TrainContext:
    """Return this worker's place; outside of a worker that of a single one."""
    session, worker = current(), _worker_context()
    if session is None:
        return TrainContext(worker, worker.local_world_size)
    plan = session.plan
    return TrainContext(worker, worker.local_world_size, plan.metadata, plan.experiment)
