"""Watches a call: its progress, workers that hang, and collectives that cannot end.

Dead workers are not detected here: Ray's error reaches `attempt.py`, and `machine.py` decides.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from raysgd._internal.context import Progress
from raysgd._internal.tracebacks import shortened_stacks
from raysgd.cluster.clock import Clock
from raysgd.cluster.worker import Outcome
from raysgd.cluster.worker_handle import WorkerHandle
from raysgd.elastic.attempt import Attempt
from raysgd.elastic.feature import Feature
from raysgd.elastic.machine import CallBlocked, Event, WorkersHung
from raysgd.errors import WorkerTimeoutError

__all__ = ["IN_COMPILER", "HealthMonitor", "Heartbeats", "await_stragglers"]

logger = logging.getLogger(__name__)

_UNEVEN_S = 30.0
"""Seconds after which to log that some workers have returned and others have not."""
_STANDSTILL_S = 60.0
"""Seconds without a batch after which to log the stacks of all workers."""
_STACKS_S = 2.0
"""Seconds that a worker has to send its stacks. A stopped process never does."""
_MENTION_STRAGGLER_S = 5.0
"""Seconds after which to log that workers are busy with a call that was interrupted."""
_IN_VAIN_S = 0.7
"""Seconds after which a collective that cannot end is interrupted."""
_IN_COLLECTIVE = (
    "_engine_run_backward",
    "distributed_c10d",
    "_sync_buffers",
    "all_reduce",
    "mpi_ops.py",  # Horovod's
    "quick_execute",  # TensorFlow's; from outside a collective in a graph looks like the rest of it
)

IN_COMPILER = ("convert_frame.py", "compile_fx.py")  # of PyTorch, forward and backward


class Heartbeats:
    """Asks workers repeatedly, and knows which do not answer, such as stopped processes.

    It is used while workers enter a generation. During a call ``hang_timeout_s`` detects them.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._asked: dict[WorkerHandle, tuple[float, Future[Any]]] = {}

    def silent(self, members: Iterable[WorkerHandle], now: float) -> list[WorkerHandle]:
        """Return the workers that have not answered for `silence_s`, without waiting."""
        found = []
        for member in members:
            asked = self._asked.get(member)
            if asked is None or asked[1].done():
                self._asked[member] = (now, member.control("progress"))
            elif now - asked[0] > self._silence_s:
                found.append(member)
        return found


@dataclass(eq=False)
class HealthMonitor(Feature):
    """Watches one attempt at a call.

    A worker counts as stuck after `hang_timeout_s` without a batch, if the call has batches.
    """

    attempt: Attempt
    ranks: Mapping[WorkerHandle, int]
    hang_timeout_s: float | None
    clock: Clock
    has_batches: bool = True
    stuck_members: list[WorkerHandle] = field(default_factory=list)
    """The workers that hung last, if some are stuck by themselves."""

    def __post_init__(self) -> None:
        self._has_shown = False
        self._moved_at = self._mentioned_at = self.clock.monotonic()
        self._seen: dict[WorkerHandle, tuple[int, int]] = {}
        self._waiting: dict[WorkerHandle, int | None] = {}
        self._waiting_since = 0.0

    def poll(self, progress: Mapping[WorkerHandle, Progress]) -> Event | None:
        """Return an event if the call does not move, or can never end."""
        self.mention_uneven()
        if (stuck := self.stuck(progress)) is not None:
            self.stuck_members = stuck
            why = (
                f"No batch finished for {self.hang_timeout_s:g} s, and no worker is stuck by "
                "itself: all wait for each other. The log has their stacks."
            )
            return WorkersHung(num_stuck=len(stuck), why=why)
        why_blocked = self.in_vain(progress)
        return None if why_blocked is None else CallBlocked(why=why_blocked)

    def mention_uneven(self) -> None:
        """Say, from time to time, which workers are still busy when others have returned."""
        now = self.clock.monotonic()
        if not self.attempt.outcomes or not self.attempt.pending:
            self._mentioned_at = now
        elif now - self._mentioned_at >= _UNEVEN_S:
            self._mentioned_at = now
            logger.warning(
                "Workers %s have returned; still waiting for workers %s, which may be waiting for "
                "them in turn. Every worker needs the same number of collective operations.",
                self._listed(self.attempt.outcomes),
                self._listed(self.attempt.pending),
            )

    def in_vain(self, progress: Mapping[WorkerHandle, Progress]) -> str | None:
        """Return a message if workers wait in a collective that cannot end; else None.

        It cannot end if each busy worker waits in a collective of all workers, and all others have
        returned: they do nothing until the next call.
        """
        now = self.clock.monotonic()
        unknown = Progress()
        waiting = {m: progress.get(m, unknown).collective for m in self.attempt.pending}
        returned = {m: progress.get(m, unknown) for m in self.attempt.outcomes}
        if (
            not returned
            or None in waiting.values()
            or not all(p.blocked_on_driver for p in returned.values())
            # a worker that has returned may have started a collective that is still running
            or any(p.collective is not None for p in returned.values())
        ):
            self._waiting = {}
        elif waiting != self._waiting:
            self._waiting, self._waiting_since = waiting, now
        elif now - self._waiting_since >= _IN_VAIN_S:
            return (
                f"Workers {self._listed(waiting)} wait in a collective operation for workers "
                f"{self._listed(returned)}, which will not come: they have returned, or "
                "reported or saved more often, and wait for the others to do so too. Every worker "
                "must communicate, report and save equally often and in the same order."
            )
        return None

    def stuck(self, progress: Mapping[WorkerHandle, Progress]) -> list[WorkerHandle] | None:
        """Return None while the call makes progress; else log all stacks, and return stuck workers.

        The list is empty if all wait for each other. No worker is stuck while one compiles.
        """
        if not self.has_batches:
            return None
        seen = {m: (p.global_step, p.num_batches) for m, p in progress.items()}
        now = self.clock.monotonic()
        if any(seen[member] != self._seen.get(member) for member in seen):
            self._seen, self._moved_at = {**self._seen, **seen}, now
            self._has_shown = False
        stood_s = now - self._moved_at
        if self.hang_timeout_s is not None and stood_s >= self.hang_timeout_s:
            stuck = self._find_stuck()
            self._moved_at = now
            return stuck
        if stood_s >= _STANDSTILL_S and not self._has_shown:
            self._has_shown = True
            self._show_stacks()
        return None

    def _show_stacks(self) -> dict[WorkerHandle, str | None] | None:
        """Log the stacks of all workers and return them; None if PyTorch compiles in one."""
        stacks = _ask_stacks(self.attempt.pending, self.clock)
        seconds = self.clock.monotonic() - self._moved_at
        compiling = [m for m, text in stacks.items() if any(s in (text or "") for s in IN_COMPILER)]
        if compiling:
            ranks = self._listed(compiling)
            logger.info(
                "No batch finished for %.0f s: torch compiles in workers %s.", seconds, ranks
            )
            return None
        logger.warning("No batch finished for %.0f s. %s", seconds, _described(stacks, self.ranks))
        return stacks

    def _find_stuck(self) -> list[WorkerHandle] | None:
        stacks = self._show_stacks()
        if stacks is None:
            return None
        silent = [member for member, text in stacks.items() if text is None]
        apart = [
            member
            for member, text in stacks.items()
            if text is not None and not any(sign in text for sign in _IN_COLLECTIVE)
        ]
        # workers in a collective wait for a worker that is not in it
        return silent or [member for member in apart if member.remote]

    def _listed(self, members: Iterable[WorkerHandle]) -> str:
        return ", ".join(str(rank) for rank in sorted(self.ranks[m] for m in members))


def _stacks_of(
    members: Iterable[WorkerHandle], ranks: Mapping[WorkerHandle, int], clock: Clock
) -> str:
    return _described(_ask_stacks(members, clock), ranks)


def _ask_stacks(members: Iterable[WorkerHandle], clock: Clock) -> dict[WorkerHandle, str | None]:
    """Return the stacks of each worker; None if it does not answer."""
    asked = {member: member.control("stacks") for member in members}
    clock.wait(asked.values(), _STACKS_S)
    return {
        member: answer.result() if answer.done() and answer.exception() is None else None
        for member, answer in asked.items()
    }


def _described(stacks: Mapping[WorkerHandle, str | None], ranks: Mapping[WorkerHandle, int]) -> str:
    return "\n".join(
        f"Worker {ranks.get(member, '(new)')} on {member.name}:\n"
        f"{'no answer: the process is stopped or gone' if text is None else shortened_stacks(text)}"
        for member, text in stacks.items()
    )


def await_stragglers(
    busy: dict[WorkerHandle, Future[Outcome]],
    ranks: Mapping[WorkerHandle, int],
    clock: Clock,
    patience_s: float,
) -> dict[WorkerHandle, BaseException]:
    """Wait for workers that are busy with an interrupted call; return those that are lost.

    Workers that have returned are removed from `busy`, even if Ctrl-C ends the wait. Workers that
    are busy after `patience_s` are lost.
    """
    stragglers = Attempt(busy, clock)
    deadline = clock.monotonic() + patience_s
    mentioned = False
    try:
        while stragglers.pending and (left := deadline - clock.monotonic()) > 0:
            quiet_s = _MENTION_STRAGGLER_S - (patience_s - left)
            stragglers.settle(left if mentioned else min(quiet_s, left))
            waited_s = clock.monotonic() - deadline + patience_s
            if stragglers.pending and not mentioned and waited_s >= _MENTION_STRAGGLER_S:
                mentioned = True
                logger.warning(
                    "Waiting up to %.0f s for workers that are still busy with the call that "
                    "failed before:\n%s",
                    left,
                    _stacks_of(stragglers.pending, ranks, clock),
                )
    finally:
        for member in busy.keys() - stragglers.pending.keys():
            del busy[member]
    why = f"still busy {patience_s:g} s after it was stopped"
    for member in stragglers.pending:
        if not member.remote:  # it cannot be killed
            raise WorkerTimeoutError(
                f"The worker in the driver's process is {why}.",
                ranks=[ranks[member]],
                waited_s=patience_s,
            )
    return stragglers.lost | {m: WorkerTimeoutError(why) for m in stragglers.pending}
