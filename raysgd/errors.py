"""The errors of raysgd.

::

    RaySGDError
    ├── WorkerLostError              (RuntimeError)  a worker or its node died
    ├── WorkerTimeoutError           (TimeoutError)  workers did not answer in time
    ├── CollectiveError              (RuntimeError)  communication between workers failed
    ├── ReplicasDifferError          (RuntimeError)  workers that must be equal differ
    ├── BadStepsError                (RuntimeError)  too many updates were not applied
    ├── InsufficientResourcesError   (RuntimeError, TimeoutError)  no room for min_workers
    ├── CheckpointError              (RuntimeError)  a checkpoint cannot be written or read
    ├── CallbackError                (RuntimeError)  a callback of the trainer raised
    └── RemoteError                  (RuntimeError)  an exception that cannot be pickled

An exception from user code on a worker reaches the caller unchanged. Its ``__cause__`` is a
:class:`RemoteTraceback` with the worker's traceback.
"""

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "BadStepsError",
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


class BadStepsError(RaySGDError, RuntimeError):
    """A call had more bad updates than ``BadSteps(max_skipped=...)`` allows.

    The state is that before the last one.

    Attributes:
        steps: The bad updates of the call, as in ``trainer.bad_steps``.
    """

    def __init__(self, message: str, steps: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(message)
        self.steps = [*steps]


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

    Used for exceptions that cannot be sent, SystemExit, and the cause of a CollectiveError.
    """


class RemoteTraceback(Exception):  # noqa: N818  a cause, never raised by itself
    """The ``__cause__`` of an exception from a worker: its rank, node and traceback as text.

    Attributes:
        text: The whole traceback. ``str`` returns only its last line of user code, or else the line
            that raised, unless RAYSGD_TRACEBACK=full.
    """

    def __init__(self, text: str, shown: str = "") -> None:
        super().__init__(text, shown)
        self.text, self._shown = text, shown

    def __str__(self) -> str:
        """Start the whole text on its own line, like a traceback."""
        return self._shown or f"\n{self.text}"
