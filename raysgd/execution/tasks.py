"""Functions of the user on workers, started by Ray's own references."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raysgd.errors import RemoteTraceback, WorkerLostError
from raysgd.execution.members import Member, is_loss, loss_cause

__all__ = ["results", "start"]


def start(
    members: Sequence[Member],
    function: Callable[..., Any],
    arguments: Sequence[Any] = (),
    keywords: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Start a function on workers; returns one reference of Ray's a worker, for ``ray.get``."""
    return [member.execute(function, *arguments, **(keywords or {})) for member in members]


def results(members: Sequence[Member], references: Sequence[Any]) -> list[Any]:
    """Wait for the functions that `start` started on these workers; return what they returned.

    Raises:
        WorkerLostError: if a worker died.
        BaseException: what a function raised, with the worker's traceback as its cause.
    """
    import ray
    import ray.exceptions

    found = []
    for rank, (member, reference) in enumerate(zip(members, references, strict=True)):
        try:
            found.append(ray.get(reference))
        except ray.exceptions.RayTaskError as error:
            cause = getattr(error, "cause", None)
            if not isinstance(cause, BaseException):
                raise
            where = f"Raised on worker {rank} on {member.name}:\n{error.traceback_str}"
            raise cause.with_traceback(None) from RemoteTraceback(where)
        except Exception as error:
            if not is_loss(error):
                raise
            said = loss_cause(error, getattr(member, "place", None))
            raise WorkerLostError(
                f"Lost worker {rank} on {member.name}: {said}",
                rank=rank,
                node_id=member.node_id,
                cause=said,
            ) from error
    return found
