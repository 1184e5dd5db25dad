"""What happened to the group, as users see it in ``trainer.events``."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Event"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened to the group of workers."""

    kind: Literal["started", "lost", "resumed", "user_error"]
    """``started``: the first generation; ``lost``: a worker died; ``resumed``: a new generation
    after a loss, an error or an interruption; ``user_error``: user code raised on a worker."""
    generation: int
    """The generation in which it happened."""
    ranks: tuple[int, ...]
    """World ranks concerned, as they were in that generation."""
    nodes: tuple[str, ...] = ()
    """Ray's ids of the nodes of those ranks."""
    step: int = 0
    """Committed steps, as far as the driver knew."""
    cause: str = ""
    """Why, in the words of Ray or of the exception."""
    seconds: float = 0.0
    """How long it took, in seconds, for what takes time."""
    time: float = field(default_factory=time.time)
    """When, in seconds since the epoch."""
