"""What a training function calls: its place among the workers, its reports and checkpoints.

A worker process has one session at a time, for all of its threads.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from raysgd.callbacks.values import numbers_in
from raysgd.context import WorkerContext
from raysgd.train.checkpoint import Checkpoint
from raysgd.train.handover import Handover, Turn

__all__ = [
    "Session",
    "TrainContext",
    "current",
    "enter",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "held_shards",
    "leave",
    "load_checkpoint",
    "local_rank",
    "receive_shards",
    "report",
    "save_checkpoint",
    "world_rank",
    "world_size",
]

logger = logging.getLogger(__name__)

TIMESTAMP = "_timestamp"
TIME_THIS_ITER_S = "_time_this_iter_s"
TRAINING_ITERATION = "_training_iteration"


class Session:
    """One run of a training function in this process.

    Args:
        context: this worker's place.
        handover: the way to the driver.
        checkpoint: what to go on from, pickled; None at the beginning.
        iteration: reports that were made before it.
        shards: this worker's data sets by name; None where there are none.
        encode: of the backend, applied to what is reported and saved.
        metadata: what the trainer was given, for `get_context`.
        experiment: names of the experiment and the trial.
    """

    def __init__(
        self,
        context: WorkerContext,
        handover: Handover,
        checkpoint: bytes | None = None,
        iteration: int = 0,
        shards: Any = None,
        encode: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        metadata: Mapping[str, Any] | None = None,
        experiment: Mapping[str, str] | None = None,
    ) -> None:
        self.context = context
        self.shards = shards
        self.metadata = dict(metadata or {})
        self.experiment = dict(experiment or {})
        self.extras: dict[str, Any] = {}
        """What the parts of this library that are about a framework keep for the run."""
        self._handover = handover
        self._checkpoint = checkpoint
        self._sent: bytes | None = None
        self.iteration = iteration
        """Reports that were made so far, those before a restart included."""
        self._encode = encode
        self._reported_at = time.monotonic()

    def report(self, metrics: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> None:
        """Hand metrics, and a checkpoint where there is one, to the driver."""
        now = time.monotonic()
        self.iteration += 1
        encoded = self._encoded(dict(metrics)) | {
            TIMESTAMP: time.time(),
            TIME_THIS_ITER_S: now - self._reported_at,
            TRAINING_ITERATION: self.iteration,
        }
        self._reported_at = now
        if checkpoint is None:
            # a checkpoint of another worker may come with the same report
            self._handover.put(self._turn("report", encoded))
            return
        blob = self._held(checkpoint.packed())
        turn = self._turn("report", encoded, blob, numbers_in(metrics), tuple(metrics))
        self._handover.put_safely(turn)

    def save(self, state: Mapping[str, Any]) -> None:
        """Hand a checkpoint to the driver; worker 0's is kept. Returns when that is safe."""
        turn = self._turn(
            "checkpoint", None, self._held(dict(state)), numbers_in(state), tuple(state)
        )
        self._handover.put_safely(turn)

    def load(self) -> dict[str, Any] | None:
        """Return the newest checkpoint, as `save` was given it."""
        if self._checkpoint is None:
            return None
        state: dict[str, Any] = pickle.loads(self._checkpoint)
        return state

    def end(self, value: Any) -> Turn:
        """Return the last turn, with what the function returned."""
        return Turn("end", value=value, iteration=self.iteration)

    def sent(self) -> bytes:
        """Return the newest checkpoint as the driver is sent it: for one that is not worker 0's."""
        assert self._sent is not None
        return self._sent

    def _turn(
        self,
        kind: Any,
        metrics: Mapping[str, Any] | None,
        blob: bytes | None = None,
        numbers: Mapping[str, float] | None = None,
        names: tuple[str, ...] = (),
    ) -> Turn:
        return Turn(
            kind,
            metrics=metrics,
            checkpoint=blob if self.context.world_rank == 0 else None,
            has_checkpoint=blob is not None,
            numbers={TIMESTAMP: time.time(), **(numbers or {})},
            names=names,
            iteration=self.iteration,
        )

    def _held(self, state: dict[str, Any]) -> bytes:
        """Keep a checkpoint for `load`, and return it as it is sent to the driver."""
        self._checkpoint = self._sent = _pickled(state)
        if self._encode is not None:
            self._sent = _pickled(self._encode(state))
        return self._sent

    def _encoded(self, data: dict[str, Any]) -> dict[str, Any]:
        return data if self._encode is None else self._encode(data)


def _pickled(state: Mapping[str, Any]) -> bytes:
    try:
        blob: bytes = cloudpickle.dumps(state)
    except Exception as error:
        raise TypeError(
            f"A checkpoint must be picklable, and this one is not: {error}. Save state_dict() of "
            "models and optimizers, and plain values."
        ) from error
    return blob


# ---- the session of this process

_SESSION: Session | None = None
_SHARDS: Any = None
_WARNED: set[str] = set()


def enter(session: Session) -> None:
    """Make `session` the one of this process."""
    global _SESSION
    _SESSION = session


def leave(session: Session) -> None:
    """Let go of `session`, unless another has taken its place."""
    global _SESSION
    if _SESSION is session:
        _SESSION = None


def current() -> Session | None:
    """Return the session of this process."""
    return _SESSION


def receive_shards(shards: Any) -> None:
    """Keep this worker's data sets for the next session."""
    global _SHARDS
    _SHARDS = shards


def held_shards() -> Any:
    """Return what `receive_shards` was given."""
    return _SHARDS


def _within_run(name: str) -> Session | None:
    """Return the session; without one warn, once for each function."""
    if _SESSION is None and name not in _WARNED:
        _WARNED.add(name)
        logger.warning(
            "raysgd.train.%s() does nothing here: it is meant for a training function, which a "
            "Trainer runs on its workers.",
            name,
        )
    return _SESSION


# ---- what users call


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
    (seconds since the epoch), ``_time_this_iter_s`` and ``_training_iteration`` (from 1) are added.
    Outside of a run it warns once and does nothing.

    Args:
        metrics: anything that can be pickled, by name. As a keyword, ``metrics=`` with a dict
            means the same where it is the only one.
        checkpoint: a :class:`Checkpoint`, from worker 0 or from all; that of the lowest rank is
            kept.
        named: the metrics themselves.

    Raises:
        TypeError: if `metrics` is no dict, or `checkpoint` no Checkpoint, or cannot be pickled.
    """
    if metrics is None and isinstance(named.get("metrics"), Mapping) and len(named) == 1:
        metrics, named = named["metrics"], {}
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
    session = _within_run("report")
    if session is not None:
        taken = None if checkpoint is None else Checkpoint.taken_from(checkpoint)
        session.report({**(metrics or {}), **named}, taken)


def save_checkpoint(**state: Any) -> None:
    """Save a checkpoint, on every worker and equally often; that of worker 0 is kept.

    Returns when the driver has it, so that it survives whatever happens to workers from then on.
    Outside of a run it warns once and does nothing.

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
    return None if session is None else session.load()


def get_checkpoint() -> Checkpoint | None:
    """Return the newest checkpoint as a :class:`Checkpoint`, or None, as `load_checkpoint` does."""
    session = _within_run("get_checkpoint")
    state = None if session is None else session.load()
    return None if state is None else Checkpoint.from_packed(state)


def world_rank() -> int:
    """Return this worker's rank among all, from 0; 0 outside of a run."""
    return 0 if _SESSION is None else _SESSION.context.world_rank


def local_rank() -> int:
    """Return this worker's rank among those on its node, from 0; 0 outside of a run."""
    return 0 if _SESSION is None else _SESSION.context.local_rank


def world_size() -> int:
    """Return the number of workers; 1 outside of a run. It changes only with a restart."""
    return 1 if _SESSION is None else _SESSION.context.world_size


def get_dataset_shard(dataset_name: str | None = None) -> Any:
    """Return this worker's part of a data set that the trainer was given.

    It stays the same over restarts with as many workers; with others it is shared out anew.
    Outside of a run it warns once and returns None.

    Args:
        dataset_name: which one, where the trainer was given several by name.

    Raises:
        RuntimeError: if the name is missing although there are several data sets.
    """
    session = _within_run("get_dataset_shard")
    shards = None if session is None else session.shards
    if not isinstance(shards, dict):
        return shards
    if dataset_name is None:
        raise RuntimeError(
            "get_dataset_shard() needs the name of one of the data sets that the trainer was "
            f"given: {', '.join(map(repr, shards))}."
        )
    return shards.get(dataset_name)


@dataclass(frozen=True)
class TrainContext:
    """This worker's place, as `get_context` returns it; the defaults hold outside of a run."""

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
    """Return this worker's place; outside of a run that of a single worker."""
    session = _SESSION
    if session is None:
        return TrainContext()
    return TrainContext(
        session.context,
        session.context.local_world_size,
        session.metadata,
        session.experiment,
    )
