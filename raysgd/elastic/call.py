"""A call on the workers, and the requests that the controller itself sends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from raysgd._internal.context import Progress, Request
from raysgd.cluster.large_values import Inbox, Incoming
from raysgd.elastic.log_points import LogPoints


@dataclass(kw_only=True)
class Call:
    """One request to the runners.

    The controller repeats it after each loss of workers, so the request must state its goal in
    absolute terms. The workers treat the parts that `Controller.run` makes of it as one call.
    """

    request: Request = field(default_factory=Request)
    method: str = ""
    """The method that the user called, for messages. By default, the name of the request."""
    rank: int | None = None
    max_losses: float = 0
    """Maximum number of losses, each of one or several workers. ``math.inf`` means no limit."""
    receives: Callable[[Sequence[str]], Inbox] | None = None
    """Returns the `Inbox` on these hosts for large answers. By default, Ray carries them."""
    any_size: bool = False
    """Whether the call can run with fewer than ``min_workers`` workers."""
    has_batches: bool = False
    """Whether workers finish batches. A worker that finishes none is then stuck."""
    can_pause: bool = False
    """Whether the call can pause at a step, so that replacement workers can join."""
    on_wait: Callable[[Sequence[Progress]], None] | None = None
    """Receives the progress of all workers while the call runs."""
    points: LogPoints = field(default_factory=lambda: LogPoints(acknowledged_step=sys.maxsize))
    """Collects what the workers measure while the call runs. By default, they release it."""
    replay: Callable[[Progress], Call | None] | None = None
    """Returns the call that repeats steps lost with all workers, or None."""
    departure_request: Request | None = None
    """Request for the metrics of a worker that leaves during the call."""
    num_losses: int = 0
    """Number of losses so far."""
    causes: list[str] = field(default_factory=list)
    """Where and why workers were lost."""
    departed_results: list[Any] = field(default_factory=list)
    """Outcomes of the `departure_request` of workers that have left."""
    save_soon: bool = False
    """Whether callbacks save as soon as possible, because workers will be preempted."""

    @property
    def name(self) -> str:
        return self.method or self.request.name

    @property
    def replaces_state(self) -> bool:
        """Whether the call needs workers, but not their state."""
        return isinstance(self.request, LoadRequest)

    def begin(self, progress: Progress) -> None:
        """Prepare the first attempt, or one after a save. ``train`` computes its goal here."""


@dataclass(frozen=True, kw_only=True)
class LoadRequest(Request):
    """Load a state. Its optimizers and models must be the last items."""

    state: dict[str, Any]
    incoming: Incoming | None = None  # receives the content of large arrays


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
