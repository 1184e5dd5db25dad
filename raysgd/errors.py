"""The errors of raysgd, and when each one happens.

::

    RaySGDError
    ├── WorkerLostError              (RuntimeError)  a worker or its node died
    ├── WorkerTimeoutError           (TimeoutError)  workers did not answer in time
    ├── CollectiveError              (RuntimeError)  workers could not talk to each other
    ├── InsufficientResourcesError   (RuntimeError, TimeoutError)  no room for min_workers
    ├── CheckpointError              (RuntimeError)  a checkpoint cannot be written or read
    ├── CallbackError                (RuntimeError)  a callback of the trainer raised
    └── RemoteError                  (RuntimeError)  an exception that does not travel as itself

An exception that user code raises on a worker is none of these: it reaches the caller as
itself, with a :class:`RemoteTraceback` as its ``__cause__`` that says where it was raised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "CallbackError",
    "CheckpointError",
    "CollectiveError",
    "InsufficientResourcesError",
    "RaySGDError",
    "RemoteError",
    "RemoteTraceback",
    "WorkerLostError",
    "WorkerTimeoutError",
]


class RaySGDError(Exception):
    """Base of every error that raysgd itself raises at run time."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep the fields when the error crosses processes."""
        return _restored, (type(self), self.args, vars(self))


def _restored(kind: type[RaySGDError], args: tuple[Any, ...], fields: dict[str, Any]) -> Any:
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(fields)
    return error


class WorkerLostError(RaySGDError, RuntimeError):
    """A worker process or its node died.

    Raised where the work cannot go on without it: more losses in one call than
    ``max_retries``, fewer survivors than ``min_workers``, or a loss during a call that must
    not be repeated (``apply_all_workers``).

    Attributes:
        rank: world rank that the worker had.
        node_id: Ray's id of the node that it ran on; empty if unknown.
        cause: what Ray said about the death.
    """

    def __init__(self, message: str, rank: int, node_id: str = "", cause: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.node_id = node_id
        self.cause = cause


class WorkerTimeoutError(RaySGDError, TimeoutError):
    """Workers did not answer within the bound of a wait.

    Attributes:
        ranks: the world ranks that did not answer.
        waited_s: how long was waited, in seconds.
    """

    def __init__(self, message: str, ranks: Sequence[int] = (), waited_s: float = 0.0) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.waited_s = waited_s


class CollectiveError(RaySGDError, RuntimeError):
    """A collective operation failed although every worker is alive (network, timeout)."""


class InsufficientResourcesError(RaySGDError, TimeoutError, RuntimeError):
    """The cluster had no room for ``min_workers`` within the start timeout.

    Attributes:
        requested: resources of one worker.
        total: resources of the cluster.
        available: resources that were free when the wait ended.
    """

    def __init__(
        self,
        message: str,
        requested: Mapping[str, float],
        total: Mapping[str, float],
        available: Mapping[str, float],
    ) -> None:
        super().__init__(message)
        self.requested = dict(requested)
        self.total = dict(total)
        self.available = dict(available)


class CheckpointError(RaySGDError, RuntimeError):
    """A checkpoint cannot be written, is damaged, or does not belong to this trainer."""


class CallbackError(RaySGDError, RuntimeError):
    """A callback raised; what it raised is the ``__cause__``.

    Raised when the call in which it happened is over: its steps are done, the other callbacks
    were called, and the trainer can be used on.

    Attributes:
        callback: name of the callback's class.
        hook: name of the hook that raised.
    """

    def __init__(self, message: str, callback: str = "", hook: str = "") -> None:
        super().__init__(message)
        self.callback = callback
        self.hook = hook


class RemoteError(RaySGDError, RuntimeError):
    """Stands in for an exception of a worker; names its type and text.

    For one that cannot be pickled, for a SystemExit, and, as the cause of a CollectiveError, for
    one that only followed from another failure.
    """


class RemoteTraceback(Exception):  # noqa: N818  a cause, never raised by itself
    """The ``__cause__`` of an exception from a worker: its rank, node and traceback as text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        """Show the text on lines of its own, as a traceback is read."""
        return f"\n{self.text}"
