"""Functions of the user on workers, as plain calls of their actors, without the controller.

For `raysgd.train`, whose users get Ray's references.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raysgd.cluster.members import Member, is_loss, loss_cause
from raysgd.errors import RemoteTraceback, WorkerLostError

__all__ = ["are_idle", "results", "start"]

_ROOT_CAUSE_S = 0.5
"""How long to look for a loss that has caused an error."""


def start(
    members: Sequence[Member],
    function: Callable[..., Any],
    arguments: Sequence[Any] = (),
    keywords: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Start a function on workers; returns one reference of Ray's a worker, for ``ray.get``."""
    return [member.execute(function, *arguments, **(keywords or {})) for member in members]


def are_idle(members: Sequence[Member], patience_s: float) -> bool:
    """Wait until workers have done what they were given, for so long; say whether they have.

    One that died has nothing to do.
    """
    import ray

    pending = start([member for member in members if member.alive], _nothing)
    if pending:
        _, pending = ray.wait(pending, num_returns=len(pending), timeout=patience_s)
    return not pending


def _nothing() -> None:
    pass


def results(members: Sequence[Member], references: Sequence[Any]) -> list[Any]:
    """Wait for the functions that `start` started on these workers; return what they returned.

    The first failure is raised at once, while the function goes on elsewhere; what is called next
    waits for it there.

    Raises:
        WorkerLostError: if a worker died.
        BaseException: what a function raised, with the worker's traceback as its cause.
    """
    import ray

    ranks = dict(zip(references, range(len(members)), strict=True))
    found: dict[int, Any] = {}
    pending = list(references)
    while pending:
        # whichever comes first: a rank that is busy, or blocked, hides no error of another
        ready, pending = ray.wait(pending)
        for reference in ready:
            rank = ranks[reference]
            try:
                found[rank] = _result(members[rank], rank, reference)
            except WorkerLostError:
                raise
            except Exception:
                _raise_loss({ranks[other]: other for other in [*ready, *pending]}, members)
                raise
    return [found[rank] for rank in range(len(members))]


def _raise_loss(references: Mapping[int, Any], members: Sequence[Member]) -> None:
    """Raise a loss, if there is one, in place of the error that it has caused on another rank.

    The peers of a dead worker see a broken connection before Ray tells of its death.
    """
    import ray

    others = list(references.values())
    done, _ = ray.wait(others, num_returns=len(others), timeout=_ROOT_CAUSE_S)
    for rank, reference in references.items():
        if reference in done:
            try:
                _result(members[rank], rank, reference)
            except WorkerLostError:
                raise
            except Exception:  # an error like the one that is being handled
                continue


def _result(member: Member, rank: int, reference: Any) -> Any:
    import ray
    import ray.exceptions

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = getattr(error, "cause", None)
        if not isinstance(cause, BaseException):
            raise
        where = f"Raised on worker {rank} on {member.name}:\n{error}"
        raise cause.with_traceback(None) from RemoteTraceback(where)
    except Exception as error:
        if not is_loss(error):
            raise
        said = loss_cause(error, getattr(member, "info", None))
        raise WorkerLostError(
            f"Lost worker {rank} on {member.name}: {said}",
            rank=rank,
            node_id=member.node_id,
            cause=said,
        ) from error
