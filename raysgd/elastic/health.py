"""Supervises a call: logs what hangs, and detects collectives that cannot end.

This module does not detect dead workers: `attempt.py` receives the Ray error of a dead worker.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from raysgd._internal.context import Progress
from raysgd._internal.tracebacks import shortened_stacks
from raysgd.cluster.clock import Clock
from raysgd.cluster.worker import Outcome
from raysgd.cluster.worker_handle import WorkerHandle
from raysgd.elastic.attempt import Attempt
from raysgd.errors import WorkerTimeoutError

logger = logging.getLogger(__name__)

_STANDSTILL_S = 60.0
"""Seconds without a finished batch after which to log the stacks of all workers."""
_STACKS_S = 2.0
_MENTION_STRAGGLER_S = 5.0
"""Seconds after which to log that workers are still busy with an interrupted call."""
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
        self._seen: dict[WorkerHandle, tuple[int, int]] = {}
        self._waiting: dict[WorkerHandle, int | None] = {}
        self._waiting_since = 0.0

    def blocked(self, progress: Mapping[WorkerHandle, Progress]) -> str | None:
        """Return a message if workers wait in a collective that cannot end, otherwise None.

        A collective cannot end if each busy worker waits in one and all others have returned.
        """
        now = self.clock.monotonic()
        unknown = Progress()
        waiting = {m: progress.get(m, unknown).collective for m in self.attempt.pending}
        returned = {m: progress.get(m, unknown) for m in self.attempt.outcomes}
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
                f"Workers {self._listed(waiting)} wait in a collective for workers "
                f"{self._listed(returned)}, which have returned, or reported or saved more often. "
                "All workers must communicate, report, and save equally often and in the same "
                "order."
            )
        return None

    def log_standstill(self, progress: Mapping[WorkerHandle, Progress]) -> None:
        """Log the stacks of all workers if no batch has finished for long."""
        seen = {m: (p.global_step, p.num_batches) for m, p in progress.items()}
        now = self.clock.monotonic()
        if any(seen[member] != self._seen.get(member) for member in seen):
            self._seen, self._moved_at = {**self._seen, **seen}, now
            self._has_shown = False
        waited_s = now - self._moved_at
        if waited_s >= _STANDSTILL_S and not self._has_shown:
            self._has_shown = True
            stacks = _stacks(self.attempt.pending, self.ranks, self.clock)
            logger.warning("No batch finished for %.0f s. %s", waited_s, stacks)

    def _listed(self, members: Iterable[WorkerHandle]) -> str:
        return ", ".join(str(rank) for rank in sorted(self.ranks[m] for m in members))


def _stacks(
    members: Iterable[WorkerHandle], ranks: Mapping[WorkerHandle, int], clock: Clock
) -> str:
    asked = {member: member.control("stacks") for member in members}
    clock.wait(asked.values(), _STACKS_S)
    told = {
        member: shortened_stacks(answer.result())
        if answer.done() and answer.exception() is None
        else "no answer: the process is stopped or gone"
        for member, answer in asked.items()
    }
    return "\n".join(
        f"Worker {ranks.get(member, '(new)')} on {member.name}:\n{text}"
        for member, text in told.items()
    )


def await_stragglers(
    busy: dict[WorkerHandle, Future[Outcome]],
    ranks: Mapping[WorkerHandle, int],
    clock: Clock,
    patience_s: float,
) -> dict[WorkerHandle, BaseException]:
    """Wait for workers that are busy with an interrupted call. Return the lost ones.

    Workers that have returned are removed from `busy`. Workers that are busy after `patience_s` are
    lost.
    """
    stragglers = Attempt(busy, clock)
    try:
        quiet_s = min(_MENTION_STRAGGLER_S, patience_s)
        stragglers.settle_until(quiet_s, lambda: False)
        if stragglers.pending and quiet_s < patience_s:
            logger.warning(
                "Waiting up to %.0f s for workers that are still busy with the failed call:\n%s",
                patience_s - quiet_s,
                _stacks(stragglers.pending, ranks, clock),
            )
            stragglers.settle_until(patience_s - quiet_s, lambda: False)
    finally:
        for member in busy.keys() - stragglers.pending.keys():
            del busy[member]
    why = f"it was still busy {patience_s:g} s after it was stopped"
    for member in stragglers.pending:
        if not member.remote:  # the driver cannot kill its own process
            raise WorkerTimeoutError(
                f"The worker in the driver's process did not stop within {patience_s:g} s.",
                ranks=[ranks[member]],
                waited_s=patience_s,
            )
    return stragglers.lost | {m: WorkerTimeoutError(why) for m in stragglers.pending}
