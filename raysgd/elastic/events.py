"""The events of a group, as users see them in ``trainer.events``."""

import time
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Event", "EventKind"]

EventKind = Literal[
    "started",
    "lost",
    "out_of_memory",
    "regrouped",
    "grown",
    "restarted",
    "replacement_failed",
    "waiting",
    "user_error",
    "draining",
    "drained",
    "rebalanced",
]


@dataclass(frozen=True, kw_only=True)
class Event:
    """One event of the group of workers."""

    kind: EventKind
    """What happened. The page "Configuration and events" describes each kind."""
    generation: int
    """Generation in which the event happened."""
    ranks: tuple[int, ...]
    """World ranks of the affected workers in that generation. -1 for a worker that never joined."""
    node_ids: tuple[str, ...] = ()
    """Ray node IDs of those ranks."""
    step: int = 0
    """Number of committed steps that the driver knew of."""
    cause: str = ""
    """Reason of the event, from Ray or the exception."""
    num_splits: int = 1
    """For ``out_of_memory``: the number of micro-batches per batch from then on."""
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
