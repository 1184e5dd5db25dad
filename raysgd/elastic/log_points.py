"""Collect what the workers measure for ``fit(log_every=...)``, while they train."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raysgd._internal.context import LogPoint, Progress

WorkerPoint = tuple[Any, LogPoint]
"""A worker, and its part of a point."""


@dataclass(eq=False)
class LogPoints:
    """The points of one call.

    A point is a step at which a log is due. Each worker has a part of it, and repeats the part in
    its progress until a later request acknowledges the point. Each point is shown once, also if a
    restart repeats its steps.
    """

    call_number: int | None = None
    show: Callable[[Sequence[WorkerPoint]], None] | None = None
    """Receives the parts of the next point. The last one is of its step."""
    _parts: dict[tuple[int, Any], LogPoint] = field(default_factory=dict)
    _reached: dict[Any, int] = field(default_factory=dict)
    """The newest point of each worker, or the step at which the worker has joined."""
    acknowledged_step: int = -1
    """Step of the newest point that was shown. Workers release their points up to it."""

    def begin(self, step: int, members: Sequence[Any]) -> None:
        """Begin an attempt at `step`. Drop the parts of steps that do not count."""
        for member in members:
            self._reached.setdefault(member, step)
        self._parts = {key: part for key, part in self._parts.items() if part.global_step <= step}
        self.add({}, members)

    def add(self, progress: Mapping[Any, Progress], members: Sequence[Any]) -> None:
        """Store the parts in the progress of workers. Show the points that all `members` have."""
        for worker, of_worker in progress.items():
            for part in of_worker.points:
                if part.call_number == self.call_number:
                    self._reached[worker] = part.global_step
                    if part.global_step > self.acknowledged_step:
                        self._parts[part.global_step, worker] = part
        until = min((self._reached.get(member, 0) for member in members), default=-1)
        log_steps = {part.global_step for part in self._parts.values() if part.reaches_log_step}
        for step in sorted(step for step in log_steps if step <= until):
            # Workers that have left have measured steps before this point.
            keys = sorted((key for key in self._parts if key[0] <= step), key=lambda key: key[0])
            if self.show is not None:
                self.show([(worker, self._parts[step, worker]) for step, worker in keys])
            self.acknowledged_step = step
            for key in keys:
                del self._parts[key]
