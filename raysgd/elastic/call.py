"""A call on the workers, what it collects, and the requests that the controller itself sends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raysgd._internal.runner import Request
from raysgd._internal.worker_status import BatchProgress, LogPoint, ReportedPosition, WorkerStatus
from raysgd.cluster.large_values import Inbox, IncomingValue

WorkerPoint = tuple[Any, LogPoint]
"""A worker, and what it has measured."""


@dataclass(eq=False)
class LogPointCollector:
    """What the workers measure for ``fit(log_every=...)`` while a call trains.

    At a step at which a log is due, each worker adds a point, and repeats it in its status until
    a later request acknowledges the step. The points of each step are shown once, also if a restart
    repeats the step.
    """

    call_number: int | None = None
    on_log: Callable[[Sequence[WorkerPoint]], None] | None = None
    """Receives the points of the next step. The last one is of this step."""
    _pending: dict[tuple[int, Any], LogPoint] = field(default_factory=dict)  # by step and worker
    _newest_steps: dict[Any, int] = field(default_factory=dict)
    """The newest point of each worker, or the step at which the worker has joined."""
    acknowledged_step: int = sys.maxsize
    """The newest step whose points were shown. Workers release their points up to it."""

    def begin(self, step: int, members: Sequence[Any]) -> None:
        """Begin an attempt at `step`. Drop the points of steps that do not count."""
        for member in members:
            self._newest_steps.setdefault(member, step)
        self._pending = {key: p for key, p in self._pending.items() if p.global_step <= step}
        self.add({}, members)

    def add(self, statuses: Mapping[Any, WorkerStatus], members: Sequence[Any]) -> None:
        """Store the points in the statuses of workers. Show those that all `members` have."""
        for worker, of_worker in statuses.items():
            for point in of_worker.measured.log_points:
                if point.call_number == self.call_number:
                    self._newest_steps[worker] = point.global_step
                    if point.global_step > self.acknowledged_step:
                        self._pending[point.global_step, worker] = point
        until = min((self._newest_steps.get(member, 0) for member in members), default=-1)
        log_steps = {p.global_step for p in self._pending.values() if p.reaches_log_step}
        for step in sorted(step for step in log_steps if step <= until):
            # Workers that have left have measured steps before this point.
            keys = sorted((key for key in self._pending if key[0] <= step), key=lambda key: key[0])
            if self.on_log is not None:
                self.on_log([(worker, self._pending[step, worker]) for step, worker in keys])
            self.acknowledged_step = step
            for key in keys:
                del self._pending[key]


@dataclass(eq=False)
class LossHistory:
    """The losses of a call so far. Calls with different requests can share it."""

    num_losses: int = 0
    """Number of losses since the call began, each of one or several workers."""
    causes: list[str] = field(default_factory=list)
    """Where and why workers were lost, also before the call began."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """What the caller wants from the runners, and what comes of it.

    The controller repeats it after each loss of workers, so the request must state its goal in
    absolute terms. The workers treat all attempts of `Controller.run` as one call.
    """

    request: Request = field(default_factory=Request)
    method: str = ""
    """The method that the user called, for messages. By default, the name of the request."""
    rank: int | None = None
    """Rank of the only worker that gets the request; None for all."""
    max_retries: float = 0
    """Maximum of `losses.num_losses`. ``math.inf`` means no limit."""
    open_inbox: Callable[[Sequence[str]], Inbox] | None = None
    """Returns the `Inbox` on these hosts for large answers. By default, Ray carries them."""
    allows_any_size: bool = False
    """Whether the call can run with fewer than ``min_workers`` workers."""
    has_batches: bool = False
    """Whether workers finish batches. A worker that finishes none is then stuck."""
    can_pause: bool = False
    """Whether the call can pause at a step, so that replacement workers can join."""
    make_request: Callable[[ReportedPosition, bool], Request] | None = None
    """Returns the request with its goal, for the first attempt and after a save. The arguments are
    the position, and whether callbacks save as soon as possible."""
    make_replay: Callable[[ReportedPosition], Call | None] | None = None
    """Returns the call that repeats steps lost with all workers, or None."""
    # What observes the call
    on_progress: Callable[[Sequence[BatchProgress]], None] | None = None
    """Receives the progress of all workers while the call runs."""
    leaving_metrics_request: Request | None = None
    """Request for the metrics of a worker that leaves during the call."""
    # What it collects while it runs
    leaving_outcomes: list[Any] = field(default_factory=list)
    """Outcomes of the `leaving_metrics_request` of workers that have left."""
    log_points: LogPointCollector = field(default_factory=LogPointCollector)
    """Collects what the workers measure. By default, they release it."""
    losses: LossHistory = field(default_factory=LossHistory)

    @property
    def name(self) -> str:
        return self.method or self.request.name

    @property
    def replaces_state(self) -> bool:
        """Whether the call needs workers, but not their state."""
        return isinstance(self.request, LoadRequest)


@dataclass(frozen=True, kw_only=True)
class LoadRequest(Request):
    """Load a state. Its optimizers and models must be the last items."""

    state: dict[str, Any]
    incoming: IncomingValue | None = None  # receives the content of large arrays


@dataclass(frozen=True, kw_only=True)
class RestartStateRequest(Request):
    """Return the worker's state for a restart, or None if the worker has no state.

    A sharded state is complete only if all `num_workers` workers receive this request.
    """

    num_workers: int = 1


class ExportShardsRequest(Request):
    """Return the shards of a worker that is about to leave."""


@dataclass(frozen=True, kw_only=True)
class ImportShardsRequest(Request):
    """Store the shards of a worker that is about to leave."""

    shards: Sequence[Any]
