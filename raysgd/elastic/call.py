"""A call on the workers: its request, its goal, and its losses so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from raysgd._internal.context import Progress, Request

__all__ = ["Call"]


@dataclass(kw_only=True)
class Call:
    """One request to the runners.

    The controller repeats it after each loss of workers, so the request must state its goal in
    absolute terms. `Controller.run` may run it in several parts, which are one call to the workers.
    """

    request: Request = field(default_factory=Request)
    rank: int | None = None
    max_losses: float = 0
    """Maximum number of lost workers. ``math.inf`` means no limit."""
    any_size: bool = False
    """Whether the call can run with fewer than ``min_workers`` workers."""
    has_batches: bool = False
    """Whether workers finish batches. A worker that finishes none is then stuck."""
    can_pause: bool = False
    """Whether the call can pause at a step, so that replacement workers can join."""
    on_wait: Callable[[Sequence[Progress]], None] | None = None
    """Function that receives the progress of all workers while the call runs."""
    catch_up: Callable[[Progress], Call | None] | None = None
    """Function that returns the call to repeat steps lost with all workers. None if no call is
    needed."""
    farewell: Request | None = None
    """Request for the metrics of a worker that leaves during the call."""
    at_once: bool = False
    """Whether callbacks save as soon as possible, because workers will be preempted."""

    num_losses: int = 0
    causes: list[str] = field(default_factory=list)
    departed_results: list[Any] = field(default_factory=list)

    @property
    def may_repeat(self) -> bool:
        """Whether the controller may repeat the call after the driver interrupted it."""
        return self.has_batches or self.max_losses > 0

    def begin(self, progress: Progress) -> None:
        """Prepare the first attempt. A call of ``train`` computes its absolute goal here."""
