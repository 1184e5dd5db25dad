"""The errors of raysgd.

::

    RaySGDError
    ├── WorkerLostError              (RuntimeError)  a worker or its node died
    ├── WorkerTimeoutError           (TimeoutError)  workers did not answer in time
    ├── CollectiveError              (RuntimeError)  communication between workers failed
    ├── ReplicasDifferError          (RuntimeError)  workers that must be equal differ
    ├── InsufficientResourcesError   (RuntimeError, TimeoutError)  no room for min_workers
    ├── CheckpointError              (RuntimeError)  a checkpoint cannot be written or read
    ├── CallbackError                (RuntimeError)  a callback of the trainer raised
    └── RemoteError                  (RuntimeError)  an exception that cannot be pickled

An exception from user code on a worker reaches the caller unchanged. Its ``__cause__`` is a
:class:`RemoteTraceback` with the worker's traceback.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "CallbackError",
    "CheckpointError",
    "CollectiveError",
    "InsufficientResourcesError",
    "RaySGDError",
    "RemoteError",
    "RemoteTraceback",
    "ReplicasDifferError",
    "WorkerLostError",
    "WorkerTimeoutError",
]


class RaySGDError(Exception):
    """Base class of all errors that raysgd raises at run time."""


class WorkerLostError(RaySGDError, RuntimeError):
    """A worker process or its node died, and the work cannot continue without it.

    Either a call lost workers more often than ``max_retries``, or fewer than ``min_workers`` are
    left, or the call must not be repeated (``apply_all_workers``).

    Attributes:
        rank: World rank of the worker.
        node_id: Ray node ID of the worker; empty if unknown.
        cause: Cause of the death as Ray reports it.
    """

    def __init__(self, message: str, rank: int = -1, node_id: str = "", cause: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.node_id = node_id
        self.cause = cause


class WorkerTimeoutError(RaySGDError, TimeoutError):
    """Workers did not answer before a timeout."""


class CollectiveError(RaySGDError, RuntimeError):
    """A collective operation failed although all workers are alive, such as after a timeout."""


class ReplicasDifferError(RaySGDError, RuntimeError):
    """Workers differ in parameters, optimizers, or options that must be equal.

    Training continues only after a state is loaded. The page "Equal replicas" lists the causes.

    Attributes:
        ranks: World ranks of the minority; empty if there is no majority.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class InsufficientResourcesError(RaySGDError, TimeoutError, RuntimeError):
    """The cluster had no room for ``min_workers`` within the start timeout."""


class CheckpointError(RaySGDError, RuntimeError):
    """A checkpoint is damaged, cannot be written, or belongs to another trainer."""


class CallbackError(RaySGDError, RuntimeError):
    """A callback raised an exception, the ``__cause__`` of this error.

    A call of the trainer raises this error at its end. The other callbacks have run, and the
    trainer remains usable.
    """


class RemoteError(RaySGDError, RuntimeError):
    """Replaces an exception of a worker. Its message has the original type and text.

    Used for exceptions that cannot be pickled, SystemExit, and the cause of a CollectiveError.
    """


class RemoteTraceback(Exception):  # noqa: N818  a cause, never raised by itself
    """The ``__cause__`` of an exception from a worker: its rank, node and traceback as text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        """Start the text on its own line, like a traceback."""
        return f"\n{self.text}"
