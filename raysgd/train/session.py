"""Functions that a training function calls: reports, checkpoints, ranks and data shards."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raysgd._internal.runner import WorkerContext
from raysgd.train.checkpoint import Checkpoint
from raysgd.train.worker_session import RunSpec, Session, process_state, worker_context

_WARNED: set[str] = set()


def _find_session(name: str) -> Session | None:
    """Return the session. Outside of a run, warn once for each function and return None."""
    session = process_state.session
    if session is None and name not in _WARNED:
        _WARNED.add(name)
        warnings.warn(
            f"raysgd.train.{name}() does nothing outside of a training function.", stacklevel=3
        )
    return session


def report(
    metrics: Mapping[str, Any] | None = None,
    /,
    checkpoint: Any = None,
    **named: Any,
) -> None:
    """Report metrics from a training function; every worker must report equally often.

    Write ``report(loss=0.1, epoch=1)`` or ``report({"loss": 0.1}, checkpoint=...)``. The call waits
    until the driver has taken the previous report. With a checkpoint, it also waits until the
    driver has saved it. raysgd adds ``_timestamp`` (whole seconds since the Unix epoch),
    ``_time_this_iter_s`` (unless you report it) and ``_training_iteration`` (from 1). Outside of a
    run, it warns once and does nothing.

    Args:
        metrics: picklable values by name. ``metrics=`` with a dict means the same unless you also
            pass other metrics by name.
        checkpoint: a :class:`Checkpoint`, a dict, or a path, from worker 0 or from all workers. The
            driver keeps the checkpoint of worker 0.
        named: metrics by name, in place of a dict.
    """
    if metrics is None and named.keys() == {"metrics"} and isinstance(named["metrics"], Mapping):
        metrics = named.pop("metrics")
    if not isinstance(metrics, Mapping | None):
        raise TypeError(f"report({metrics!r}): must be a dict. You can also pass metrics by name.")
    if metrics is not None and named:
        raise TypeError(
            f"report() has no argument {next(iter(named))!r}. Pass all metrics in the dict, or all "
            "by name."
        )
    if (session := _find_session("report")) is not None:
        session.report(named if metrics is None else metrics, checkpoint)


def save_checkpoint(**state: Any) -> None:
    """Save a checkpoint of worker 0; every worker must call this equally often.

    Returns when the driver holds the checkpoint, so that a loss of workers cannot lose it. `state`
    has picklable values by name, and `load_checkpoint` returns them as a dict. raysgd adds
    ``_timestamp`` (whole seconds since the Unix epoch). GPU tensors load on the CPU. A
    DistributedDataParallel is saved as the model that it wraps. Outside of a run, it warns once and
    does nothing.
    """
    if (session := _find_session("save_checkpoint")) is not None:
        session.save(state)


def load_checkpoint() -> dict[str, Any] | None:
    """Return this worker's newest checkpoint as a dict, or the one that it started from.

    Workers start, and restart, from a checkpoint of worker 0. Return None if there is no
    checkpoint. Outside of a run, it warns once and returns None.
    """
    session = _find_session("load_checkpoint")
    checkpoint = None if session is None else session.load()
    return None if checkpoint is None else checkpoint.to_dict()


def get_checkpoint() -> Checkpoint | None:
    """Return the checkpoint of `load_checkpoint` as a :class:`Checkpoint`."""
    session = _find_session("get_checkpoint")
    return None if session is None else session.load()


def world_rank() -> int:
    """Return this worker's rank among all workers, from 0; 0 outside of a worker."""
    return worker_context().world_rank


def local_rank() -> int:
    """Return this worker's rank on its node, from 0; 0 outside of a worker."""
    return worker_context().local_rank


def world_size() -> int:
    """Return the number of workers; 1 outside of a worker. Only a restart changes it."""
    return worker_context().world_size


def get_dataset_shard(dataset_name: str | None = None) -> Any:
    """Return this worker's shard of a data set of the trainer.

    A restart with the same number of workers keeps the shards. A restart with another number
    splits the data set again. The name is required if the data sets have names. Outside of a run,
    or if the trainer has no data set, it warns and returns None.
    """
    if _find_session("get_dataset_shard") is None:
        return None
    if (shards := process_state.datasets) is None:
        warnings.warn(
            "get_dataset_shard() returns None, because the trainer has no data set.",
            stacklevel=2,
        )
    if not isinstance(shards, dict):
        return shards
    names = ", ".join(map(repr, shards))
    if dataset_name is None:
        raise RuntimeError(f"get_dataset_shard() needs the name of one of the data sets: {names}.")
    if dataset_name not in shards:
        raise KeyError(f"get_dataset_shard({dataset_name!r}): must be one of {names}.")
    return shards[dataset_name]


@dataclass(frozen=True)
class TrainContext:
    """This worker's ranks and run. Outside of a worker, methods answer as for a single worker."""

    worker: WorkerContext = field(default_factory=WorkerContext)
    spec: RunSpec = field(default_factory=RunSpec)

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
        return self.worker.local_world_size

    def get_node_rank(self) -> int:
        """Return the rank of this node among the nodes that have workers."""
        return self.worker.node_rank

    def get_share(self) -> float:
        """Return this worker's fraction of the global batch, from 0 to 1.

        The fraction is ``1 / get_world_size()`` unless ``ElasticConfig(shares={...})`` sets others.
        """
        shares = self.worker.shares or (1.0,) * self.worker.world_size
        return shares[self.worker.world_rank] / sum(shares)

    def get_metadata(self) -> dict[str, Any]:
        """Return the trainer's ``metadata``."""
        return dict(self.spec.metadata)

    def get_experiment_name(self) -> str:
        """Return the name of the run or the trial."""
        return self.spec.name

    get_trial_name = get_experiment_name

    def get_trial_id(self) -> str:
        """Return the unique ID of the run."""
        return self.spec.run_id

    def get_trial_dir(self) -> str:
        """Return the folder of the run on the driver; empty in a trial of Tune."""
        return self.spec.folder


def get_context() -> TrainContext:
    """Return this worker's context; outside of a worker, the context of a single worker."""
    spec = RunSpec() if process_state.session is None else process_state.session.spec
    return TrainContext(worker_context(), spec)


def __getattr__(name: str) -> Any:
    """Let this module take the place of ``ray.air.session``, which has further names of a context.

    The functions of Ray only log a warning in training functions of raysgd.
    """
    return getattr(get_context(), name)
