"""A call on the workers, as a value: its goal, and its losses so far."""

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
    """How often workers may be lost; ``math.inf`` for no limit."""
    any_size: bool = False
    """Whether fewer workers than ``min_workers`` are enough."""
    has_batches: bool = False
    """Whether workers finish batches, so that one that does not is stuck."""
    can_pause: bool = False
    """Whether it can pause at a step, where replacement workers join."""
    on_wait: Callable[[Sequence[Progress]], None] | None = None
    """Called with the progress of all workers while it runs."""
    catch_up: Callable[[Progress], Call | None] | None = None
    """Returns the call that repeats steps lost with all workers; None if this call needs none."""
    farewell: Request | None = None
    """Request for the metrics of a worker that leaves during the call."""
    at_once: bool = False
    """Whether callbacks save as soon as possible, because workers will leave."""

    num_losses: int = 0
    causes: list[str] = field(default_factory=list)
    departed_results: list[Any] = field(default_factory=list)

    @property
    def may_repeat(self) -> bool:
        """Whether it may be repeated after the driver interrupted it."""
        return self.has_batches or self.max_losses > 0

    def begin(self, progress: Progress) -> None:
        """Prepare to be sent for the first time. A call of train makes its goal absolute here."""
