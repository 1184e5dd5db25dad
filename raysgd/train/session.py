"""One run of a training function in a worker: its place, its reports and its checkpoints.

A worker process has one session at a time, for all of its threads.
"""

from __future__ import annotations

import pickle
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle

from raysgd.callbacks.values import numbers_in
from raysgd.context import WorkerContext
from raysgd.train.checkpoint import Checkpoint
from raysgd.train.report_queue import ReportQueue, Turn

__all__ = [
    "Session",
    "current",
    "enter",
    "held_shards",
    "is_left_behind",
    "leave",
    "receive_shards",
    "take_place",
    "worker_context",
]

TIMESTAMP = "_timestamp"
TIME_THIS_ITER_S = "_time_this_iter_s"
TRAINING_ITERATION = "_training_iteration"


class Session:
    """One run of a training function in this process.

    Args:
        context: this worker's place.
        report_queue: the way to the driver.
        checkpoint: what to go on from, pickled; None at the beginning.
        iteration: reports that were made before it.
        shards: this worker's data sets by name; None where there are none.
        encode: of the backend, applied to what is reported and saved.
        metadata: what the trainer was given, for `get_context`.
        experiment: names of the experiment and the trial.
        run: a name that no other run, and none before a restart, has; the same on all workers.
    """

    def __init__(
        self,
        context: WorkerContext,
        report_queue: ReportQueue,
        checkpoint: bytes | None = None,
        iteration: int = 0,
        shards: Any = None,
        encode: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        metadata: Mapping[str, Any] | None = None,
        experiment: Mapping[str, str] | None = None,
        run: str = "",
    ) -> None:
        self.context = context
        self.run = run
        self.shards = shards
        self.metadata = dict(metadata or {})
        self.experiment = dict(experiment or {})
        self.extras: dict[str, Any] = {}
        """What the parts of this library that are about a framework keep for the run."""
        self._report_queue = report_queue
        self._checkpoint = checkpoint
        self._sent: bytes | None = None
        self.iteration = iteration
        """Reports that were made so far, those before a restart included."""
        self._encode = encode
        self._reported_at = time.monotonic()
        self._threads_before = weakref.WeakSet(threading.enumerate())

    def threads(self) -> list[threading.Thread]:
        """Return the threads that were started since, the caller's aside, and still run."""
        return [
            thread
            for thread in threading.enumerate()
            if thread not in self._threads_before
            and thread is not threading.current_thread()
            # those that Python did not start belong to no run: Ray's, by which the driver calls
            and not isinstance(thread, threading._DummyThread)
        ]

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
            self._report_queue.put(self._turn("report", encoded))
            return
        blob = self._held(checkpoint.packed(self.metadata))
        turn = self._turn("report", encoded, blob, numbers_in(metrics), tuple(metrics))
        self._report_queue.put_safely(turn)

    def save(self, state: Mapping[str, Any]) -> None:
        """Hand a checkpoint to the driver; worker 0's is kept. Returns when that is safe."""
        turn = self._turn(
            "checkpoint", None, self._held(dict(state)), numbers_in(state), tuple(state)
        )
        self._report_queue.put_safely(turn)

    def load(self) -> dict[str, Any] | None:
        """Return the newest checkpoint, as `save` was given it."""
        if self._checkpoint is None:
            return None
        state: dict[str, Any] = pickle.loads(self._checkpoint)
        return state

    def end(self, value: Any) -> Turn:
        """Return the last turn, with what the function returned."""
        return Turn("end", value=value, iteration=self.iteration)

    def sent(self) -> bytes | None:
        """Return the newest checkpoint as the driver is sent it; None if none has been made here.

        It is asked for where it is not worker 0's.
        """
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
_LEFT_BEHIND: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_SHARDS: Any = None
_PLACE: WorkerContext | None = None
"""For what runs in a worker and is no run, such as the classes of `to_worker_group`."""


def enter(session: Session) -> None:
    """Make `session` the one of this process."""
    global _SESSION
    _SESSION = session


def leave(session: Session) -> None:
    """Let go of `session`, unless another has taken its place."""
    global _SESSION
    _LEFT_BEHIND.update(session.threads())
    if _SESSION is session:
        _SESSION = None


def is_left_behind() -> bool:
    """Whether the calling thread was started in a session that is over."""
    return threading.current_thread() in _LEFT_BEHIND


def current() -> Session | None:
    """Return the session of this process."""
    return _SESSION


def take_place(context: WorkerContext | None) -> None:
    """Note this worker's place in the group; None where it has left it."""
    global _PLACE
    _PLACE = context


def worker_context() -> WorkerContext | None:
    """Return this worker's place, also between runs; None where the process is no worker."""
    return _PLACE if _SESSION is None else _SESSION.context


def receive_shards(shards: Any) -> None:
    """Keep this worker's data sets for the next session."""
    global _SHARDS
    _SHARDS = shards


def held_shards() -> Any:
    """Return what `receive_shards` was given."""
    return _SHARDS
