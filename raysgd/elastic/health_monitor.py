"""Supervises a call: logs what hangs, and detects collectives that cannot end.

This module does not detect dead workers: `attempt.py` receives the Ray error of a dead worker.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from raysgd._internal.progress import ProcessStatus, Progress, ReportedPosition
from raysgd.cluster.clock import Clock
from raysgd.cluster.worker import Worker
from raysgd.cluster.worker_handle import WorkerHandle
from raysgd.elastic.attempt import Attempt, results_of
from raysgd.elastic.group_record import list_ranks

logger = logging.getLogger(__name__)

_STANDSTILL_S = 60.0
"""Seconds without a finished batch after which to log the stacks of all workers."""
_STACKS_S = 2.0
_BLOCKED_S = 0.7
"""Seconds that a blocked collective may take before the driver interrupts it."""


@dataclass(eq=False)
class HealthMonitor:
    """Watches one attempt at a call."""

    attempt: Attempt
    ranks: Mapping[WorkerHandle, int]
    clock: Clock

    def __post_init__(self) -> None:
        self._has_shown = False
        self._moved_at = self.clock.monotonic()
        self._seen: dict[WorkerHandle, ReportedPosition] = {}
        self._waiting: dict[WorkerHandle, int | None] = {}
        self._waiting_since = 0.0

    def find_deadlock(self, progress: Mapping[WorkerHandle, Progress]) -> str | None:
        """Return a message if workers wait in a collective that cannot end, otherwise None.

        A collective cannot end if each busy worker waits in one and all others have returned.
        """
        now = self.clock.monotonic()
        known, unknown = {m: p.process for m, p in progress.items()}, ProcessStatus()
        waiting = {m: known.get(m, unknown).collective for m in self.attempt.pending}
        returned = {m: known.get(m, unknown) for m in self.attempt.outcomes}
        if (
            not returned
            or None in waiting.values()
            or not all(p.blocked_on_driver for p in returned.values())
            # A worker that has returned may have started a collective that is still running.
            or any(p.collective is not None for p in returned.values())
        ):
            self._waiting = {}
        elif waiting != self._waiting:
            self._waiting, self._waiting_since = waiting, now
        elif now - self._waiting_since >= _BLOCKED_S:
            return (
                f"Workers {list_ranks(self.ranks, waiting)} wait in a collective for workers "
                f"{list_ranks(self.ranks, returned)}, which have returned, or reported or saved "
                "more often. All workers must train, communicate, report, and save equally often "
                "and in the same order."
            )
        return None

    def log_standstill(self, progress: Mapping[WorkerHandle, Progress]) -> None:
        """Log the stacks of all workers if no batch has finished for long."""
        seen = {member: each.position for member, each in progress.items()}
        now = self.clock.monotonic()
        if any(seen[member] != self._seen.get(member) for member in seen):
            self._seen, self._moved_at = {**self._seen, **seen}, now
            self._has_shown = False
        waited_s = now - self._moved_at
        if waited_s >= _STANDSTILL_S and not self._has_shown:
            self._has_shown = True
            asked = {m: m.submit_control(Worker.stacks) for m in self.attempt.pending}
            self.clock.wait(asked.values(), _STACKS_S)
            answers, none = results_of(asked), "no answer: the process is stopped or gone"
            stacks = [
                f"Worker {self.ranks[member]} on {member.name}:\n{answers.get(member, none)}"
                for member in asked
            ]
            logger.warning("No batch finished for %.0f s. %s", waited_s, "\n".join(stacks))
