"""Runs functions on workers by plain actor calls, without a controller."""

import time
from collections.abc import Sequence
from typing import Any

from raysgd.cluster.actor_group import ActorGroup
from raysgd.cluster.group_options import PROCESS_START_S, START_ADVICE
from raysgd.cluster.worker import CarriedError, Worker
from raysgd.cluster.worker_handle import (
    ROOT_CAUSE_S,
    WorkerHandle,
    exit_cause,
    is_worker_failure,
)
from raysgd.errors import RemoteTraceback, WorkerLostError, WorkerTimeoutError


def start(group: ActorGroup, num_workers: int) -> None:
    """Append workers to a group, and wait until they run. On an error, add no worker."""
    group.request_slots(only_if_lost=True)
    slots = group.find_vacant_slots()[:num_workers]
    if missing := num_workers - len(slots):
        slots += group.reserve_more(missing)
    members = [group.start_worker(slot) for slot in slots]
    try:
        _locate(members, group)
    except BaseException:
        group.discard(*members)
        raise
    group.members += members


def _locate(members: Sequence[WorkerHandle], group: ActorGroup) -> None:
    timeout_s = max(group.options.start_timeout_s, PROCESS_START_S)
    locations = [member.submit_control(Worker.locate) for member in members]
    if missing := group.clock.wait(locations, timeout_s):
        ranks = [rank for rank, location in enumerate(locations) if location in missing]
        raise WorkerTimeoutError(
            f"Processes of workers {', '.join(map(str, ranks))} did not start within "
            f"{timeout_s:g} s. {START_ADVICE}"
        )
    for member, location in zip(members, locations, strict=True):
        try:
            member.start_watching(location.result())
        except Exception as error:
            if is_worker_failure(error):
                raise WorkerLostError(f"A worker died during its start: {error}") from error
            raise


def wait_until_idle(members: Sequence[WorkerHandle], patience_s: float) -> bool:
    """Wait, and return whether all workers are idle or dead."""
    import ray

    pending = [member.execute(bool) for member in members if member.can_be_called]  # does nothing
    if pending:
        _, pending = ray.wait(pending, num_returns=len(pending), timeout=patience_s)
    return not pending


def results(members: Sequence[WorkerHandle], references: Sequence[Any]) -> list[Any]:
    """Wait for a function on each of these workers, and return the results.

    Raise the first failure, or the loss that caused it, while other workers are still busy. The
    results are no futures, because Ray would unpickle them in a thread where no user code may run.
    """
    import ray

    ranks = dict(zip(references, range(len(members)), strict=True))
    by_rank: dict[int, Any] = {}
    failure: Exception | None = None
    deadline = 0.0
    pending = list(references)
    while pending:
        left_s = None if failure is None else max(0.0, deadline - time.monotonic())
        ready, pending = ray.wait(pending, timeout=left_s)
        if not ready:
            break
        rank = ranks[ready[0]]
        try:
            by_rank[rank] = _result(members[rank], rank, ready[0])
        except WorkerLostError:
            raise
        except Exception as error:
            if failure is None:
                failure, deadline = error, time.monotonic() + ROOT_CAUSE_S
    if failure is not None:
        raise failure
    return [by_rank[rank] for rank in range(len(members))]


def _result(member: WorkerHandle, rank: int, reference: Any) -> Any:
    import ray
    import ray.exceptions

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, CarriedError):
            (cause,) = cause.args
        if not isinstance(cause, BaseException):
            raise
        where = f"Raised on worker {rank} on {member.node_name}:\n{error}"
        raise cause.with_traceback(None) from RemoteTraceback(where)
    except Exception as error:
        if not is_worker_failure(error):
            raise
        cause_text = exit_cause(error, member.location)
        raise WorkerLostError(
            f"Lost worker {rank} on {member.node_name}: {cause_text}",
            rank=rank,
            node_id=member.location.node_id,
            cause=cause_text,
        ) from error
