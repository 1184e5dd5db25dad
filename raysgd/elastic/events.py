"""The events of a group, as users see them in ``trainer.events``."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Event", "EventKind"]


EventKind = Literal[
    "started",
    "lost",
    "hung",
    "split",
    "resumed",
    "grown",
    "restarted",
    "newcomer_failed",
    "waiting",
    "user_error",
    "draining",
    "moved",
    "rebalanced",
]


@dataclass(frozen=True, kw_only=True)
class Event:
    """One event of the group of workers."""

    kind: EventKind
    """``started``: the first generation. ``lost``: a worker died. ``hung``: a worker was stuck, and
    is killed. ``split``: a worker ran out of memory, and the step is repeated with batches in more
    parts. ``resumed``: a new generation of the same or fewer workers, after a loss, an error, an
    interruption, or a preemption. ``grown``: a new generation with replacement workers.
    ``restarted``: all workers restarted from the snapshot. ``newcomer_failed``: a worker died or
    raised before it joined, or during a start. ``waiting``: there are too few workers, and no
    resources for more. ``user_error``: user code raised. ``draining``: workers will be preempted,
    within ``seconds`` if a deadline is known. ``moved``: replacement workers have taken over from
    preempted workers. ``rebalanced``: the workers have new shares of the global batch."""
    generation: int
    """Generation in which the event happened."""
    ranks: tuple[int, ...]
    """World ranks of the affected workers in that generation. -1 for a worker that never joined."""
    nodes: tuple[str, ...] = ()
    """Ray node IDs of those ranks."""
    step: int = 0
    """Number of committed steps that the driver knew of."""
    cause: str = ""
    """Reason of the event, from Ray or the exception."""
    factor: int = 1
    """For ``split``: the number of parts of each batch from then on."""
    shares: tuple[float, ...] = ()
    """For ``rebalanced``: the new shares by rank. Their mean is 1."""
    old_shares: tuple[float, ...] = ()
    """For ``rebalanced``: the earlier shares, by the ranks that the workers had then."""
    num_workers: int = 0
    """Size of the group after the event."""
    seconds: float = 0.0
    """Duration in seconds, for events that take time."""
    time: float = field(default_factory=time.time)
    """Time of the event, in seconds since the Unix epoch."""
