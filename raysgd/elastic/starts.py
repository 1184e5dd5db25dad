"""Starts and restarts of all workers, and the wait for enough workers."""

from __future__ import annotations

import logging
import random

from raysgd.elastic.driver_context import DriverContext
from raysgd.elastic.events import EventKind
from raysgd.elastic.machine import Event, WorkersReady
from raysgd.elastic.policies import backoff_s
from raysgd.errors import WorkerLostError

__all__ = ["Starts"]

logger = logging.getLogger(__name__)

_START_TICK_S = 0.01
_BUSY_TICK_S = 0.05


class Starts:
    """Starts all workers, and records the result."""

    def __init__(self, context: DriverContext) -> None:
        self._context = context
        self._group, self._journal = context.group, context.journal
        self._scale_up = context.scale_up
        self._has_started = False
        self._since, self._num_before, self._left = 0.0, 0, ""

    def await_workers(self, min_workers: int) -> Event:
        """Wait until there are enough workers. Each wait for resources is longer than the last."""
        config, causes = self._context.elastic, self._context.call.causes
        num_members, starting = len(self._group.members), not self._group.members
        missing = f"{num_members} left, min_workers={min_workers}"
        deadline, number = 0.0, 0
        while True:
            self._context.check_open()
            if starting:
                self._scale_up.tick(starting=True)
            else:
                self._scale_up.poll({})
            if starting and (error := self._scale_up.error) is not None:
                if isinstance(error, WorkerLostError) and causes:
                    raise self._journal.failure(str(error), causes, cause=error)
                raise error
            if self._scale_up.are_enough(min_workers):
                return WorkersReady()
            now = self._group.clock.monotonic()
            is_short = num_members + self._scale_up.coming() < min_workers
            if is_short and now >= deadline and not self._group.drains.is_ray_silent:
                room = self._group.room()
                if number == config.max_attempts:
                    why = f"{missing}, and no room for more: {room}"
                    raise self._journal.failure(why, causes)
                wait_s = backoff_s(number, config, random.random())
                self._journal.record("waiting", [], cause=missing, seconds=wait_s)
                deadline, number = now + wait_s, number + 1
                logger.warning(
                    "Too few workers (%s). Try %d of %d, for %.1f s: %s",
                    missing,
                    number,
                    config.max_attempts,
                    wait_s,
                    room,
                )
            self._group.clock.sleep(_START_TICK_S if starting else _BUSY_TICK_S)

    def restart(self) -> None:
        """Stop the members, and begin to start new workers."""
        self._since, self._num_before = self._group.clock.monotonic(), len(self._group.members)
        self._left = "; ".join(f"left {member.name}" for member in self._context.leaving)
        self._context.has_state |= bool(self._context.leaving)
        self._context.discard_members()
        if not self._context.recovery.joins:
            self._scale_up.stop()  # they only waited for resources
        self._scale_up.begin()

    def note_start(self) -> None:
        """Record that the workers have started, or restarted."""
        if not (self._context.recovery.joins and self._context.elastic.grow):
            self._scale_up.stop()  # late workers could never join
        if not self._has_started:
            self._has_started = True
            self._journal.record("started", self._group.members)
            return
        step = self._journal.progress.global_step
        has_grown = 0 < self._num_before < len(self._group.members)
        joining = self._group.members[self._num_before :] if has_grown else self._group.members
        kind: EventKind = "grown" if has_grown else "restarted"
        if self._left and len(self._group.members) >= self._num_before:
            kind = "moved"
        seconds = self._group.clock.monotonic() - self._since
        self._journal.record(kind, joining, cause=self._left, seconds=seconds)
        logger.info("Restarted %d workers from step %d.", len(self._group.members), step)
