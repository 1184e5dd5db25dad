"""What happened to the group, as users see it in ``trainer.events``."""

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
]


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened to the group of workers."""

    kind: EventKind
    """``started``: the first generation. ``lost``: a worker died. ``hung``: a worker was stuck,
    and is killed. ``split``: a worker ran out of memory in a step, which is done again with batches
    in more parts. ``resumed``: a new generation of the same or fewer workers, after a loss, an
    error or an interruption, or as workers left that were to go. ``grown``: a new generation with
    replacement workers. ``restarted``: workers anew, from the snapshot. ``newcomer_failed``: a
    worker died or raised before it joined, at a start as well. ``waiting``: too few workers, and no
    room for more. ``user_error``: user code raised. ``draining``: workers are announced to go, in
    ``seconds`` where a time was named. ``moved``: replacement workers have taken over from workers
    that were to go."""
    generation: int
    """The generation in which it happened."""
    ranks: tuple[int, ...]
    """World ranks concerned, as they were in that generation; -1: one that never joined."""
    nodes: tuple[str, ...] = ()
    """Ray's ids of the nodes of those ranks."""
    step: int = 0
    """Committed steps, as far as the driver knew."""
    cause: str = ""
    """Why, in the words of Ray or of the exception."""
    num_batches: int = 0
    """For ``lost``: batches of the call under way whose metrics died with the worker. The steps
    are not lost, and ``num_samples`` is exact; means are over the batches that are left."""
    factor: int = 1
    """For ``split``: in how many parts each batch is trained from then on."""
    num_workers: int = 0
    """Workers there are after it."""
    seconds: float = 0.0
    """How long it took, in seconds, for what takes time."""
    time: float = field(default_factory=time.time)
    """When, in seconds since the epoch."""
