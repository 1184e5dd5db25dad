"""A call on the workers, as a value: what it is to reach, and what has been seen of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from raysgd._internal.context import Progress, Request
from raysgd.cluster.worker_handle import WorkerHandle

__all__ = ["Call"]


@dataclass(kw_only=True)
class Call:
    """One request to the runners.

    The controller repeats it after each loss of workers, so the request must state its goal in
    absolute terms. `Controller.run` may run it in several parts, which are one call to the workers.
    """

    request: Request = field(default_factory=Request)
    rank: int | None = None
    """The only worker to call; None: all."""
    max_losses: float = 0
    """How often workers may be lost in it; ``math.inf`` for as often as they are."""
    any_size: bool = False
    """Whether fewer workers than ``min_workers`` will do."""
    has_batches: bool = False
    """Whether workers finish batches in it; one that does not is stuck."""
    can_pause: bool = False
    """Whether it can pause at a step, for replacement workers to join there."""
    on_wait: Callable[[Sequence[Progress]], None] | None = None
    """Called with every worker's progress while it runs."""
    catch_up: Callable[[Progress], Call | None] | None = None
    """Returns the call that trains so far again, to be made before this one where all workers were
    lost and took steps with them; None: this one does not need these steps, or redoes them."""

    farewell: Request | None = None
    """Request for the metrics of a worker that leaves during the call."""
    at_once: bool = False
    """Whether callbacks that save are to do so as soon as can be, since workers are going."""

    num_splits: int = 0
    """How often workers ran out of memory in it, so that it was made again with smaller batches."""
    num_losses: int = 0
    """How often workers were lost in it."""
    causes: list[str] = field(default_factory=list)
    """What each worker was lost by in it."""
    metrics_start_step: dict[WorkerHandle, int] = field(default_factory=dict)
    """Committed steps when a worker began to measure: what it has measured of the call since then
    is in its process alone, and lost with it."""
    departed_results: list[Any] = field(default_factory=list)
    """Metrics of workers that left during the call."""
    num_missing: int = 0
    """Workers with incomplete metrics: they ended before they answered, or were a step behind when
    the group formed again."""

    @property
    def may_repeat(self) -> bool:
        """Whether it may be made again where workers were stopped in it."""
        return self.has_batches or self.max_losses > 0

    def begin(self, members: Sequence[WorkerHandle], progress: Progress) -> None:
        """Note how far training is as the part reaches its workers for the first time.

        A call to train makes its goal absolute here.
        """
        since = dict.fromkeys(members, progress.global_step)
        self.metrics_start_step = since | self.metrics_start_step
