"""Starts and restarts of all workers, until they form a group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from raysgd._internal.context import Progress
from raysgd.cluster.serialization import sendable
from raysgd.cluster.worker_handle import WorkerHandle
from raysgd.elastic.call import LoadRequest
from raysgd.elastic.driver_context import DriverContext
from raysgd.elastic.events import EventKind
from raysgd.elastic.generation import GroupForming
from raysgd.elastic.machine import Event, FormingFailed, GroupFormed, WorkersReady, too_few
from raysgd.elastic.policies import backoff_s
from raysgd.elastic.replacement import Replacement
from raysgd.errors import WorkerLostError

logger = logging.getLogger(__name__)

_START_TICK_S = 0.01
_BUSY_TICK_S = 0.05


class Starts:
    """Starts all workers, and forms their first group."""

    def __init__(self, context: DriverContext, forming: GroupForming) -> None:
        self._context, self._forming = context, forming
        self._group, self._journal = context.group, context.journal
        self._scale_up = context.scale_up
        self._has_started = False
        self._since, self._num_before, self._left = 0.0, 0, ""
        self.on_start: Callable[[], None] | None = None
        """Called after all workers have started, before they load a snapshot."""

    def restart(self) -> None:
        self._since, self._num_before = self._group.clock.monotonic(), len(self._group.members)
        self._left = "; ".join(f"left {member.name}" for member in self._context.leaving)
        self._context.has_state |= bool(self._context.leaving)
        self._context.discard_members()
        if not self._context.recovery.joins:
            self._scale_up.stop()  # these replacements only waited for resources
        self._scale_up.begin()

    def await_workers(self, min_workers: int) -> Event:
        """Wait until there are enough workers. Each wait for resources is longer than the last."""
        config, causes = self._context.elastic, self._context.call.causes
        num_members, starting = len(self._group.members), not self._group.members
        missing = too_few(num_members, min_workers)
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
                    why = f"{missing}, and the resources for more are not free: {room}"
                    raise self._journal.failure(why, causes)
                wait_s = backoff_s(number, config)
                self._journal.record("waiting", [], cause=missing, seconds=wait_s)
                deadline, number = now + wait_s, number + 1
                logger.warning(
                    "%s. Waiting %.1f s for resources (%d of %d): %s",
                    missing,
                    wait_s,
                    number,
                    config.max_attempts,
                    room,
                )
            self._group.clock.sleep(_START_TICK_S if starting else _BUSY_TICK_S)

    def start_group(self) -> Event:
        """Form a group of the ready workers, with the state of the newest snapshot."""
        ready = self._scale_up.ready()
        joining = {r.member: r for r in ready if r.member is not None}
        _, lost = self._context.commands.reach(joining)
        if lost:
            for member, error in lost.items():
                self._scale_up.fail(joining[member], error)
            return FormingFailed(by_newcomer=True)
        event: Event = GroupFormed()
        try:
            self._enter_together(joining)
        except WorkerLostError as failure:
            self._abort(joining, failure)
            event = FormingFailed(by_newcomer=True)
        else:
            self._scale_up.forget_joined(ready)
        self._scale_up.set_up_alone()
        if isinstance(event, GroupFormed):
            self._record_start()
        return event

    def _enter_together(self, joining: Mapping[WorkerHandle, Replacement]) -> None:
        forming = self._forming
        members = self._group.in_order(sorted(joining, key=lambda member: member.remote))
        contexts = forming.next_contexts(members)
        self._journal.number(members)
        leader = None
        if self._scale_up.together:
            for member, context in zip(members, contexts, strict=True):
                joining[member].context, joining[member].step = context, "set up"
            prepared = forming.step("prepare", [(c,) for c in contexts], "get ready", members)
            forming.raise_failure(prepared)
        else:
            leader = members[0]
            self._load_snapshot([leader])  # the other workers get the snapshot from the leader
        forming.raise_failure(forming.enter(members, contexts, leader))
        self._group.members[:] = members
        if self.on_start is not None:
            self.on_start()
        if leader is None:
            self._load_snapshot(members)

    def _load_snapshot(self, members: Sequence[WorkerHandle]) -> None:
        state = self._context.snapshots.state()
        self._journal.progress = Progress()
        if state is None:
            return
        packed = sendable("the snapshot", LoadRequest(state=dict(state)))
        attempt = self._forming.step("call", [(packed,)] * len(members), "load", members)
        self._forming.raise_failure(attempt)
        self._journal.progress = next(iter(attempt.outcomes.values())).progress

    def _abort(self, joining: Mapping[WorkerHandle, Replacement], error: Exception) -> None:
        """Discard the lost workers. The other workers stay if possible."""
        # Replace processes that `on_start` may have changed, or that can join only one group.
        are_used = bool(self._group.members) or not self._context.recovery.rejoins
        self._group.members.clear()
        _, lost = self._context.commands.reach(joining)
        if not lost:
            raise error
        for member, replacement in joining.items():
            self._context.commands.busy.pop(member, None)
            if member in lost:
                self._scale_up.fail(replacement, lost[member])
            elif are_used:
                self._scale_up.drop(replacement)
        # A late interruption of this generation must not reach later work.
        self._forming.next_generation()

    def _record_start(self) -> None:
        if not (self._context.recovery.joins and self._context.elastic.grow):
            self._scale_up.stop()  # late workers could never join
        if not self._has_started:
            self._has_started = True
            self._journal.record("started", self._group.members)
            return
        has_grown = 0 < self._num_before < len(self._group.members)
        joining = self._group.members[self._num_before :] if has_grown else self._group.members
        kind: EventKind = "grown" if has_grown else "restarted"
        if self._left and len(self._group.members) >= self._num_before:
            kind = "moved"
        seconds = self._group.clock.monotonic() - self._since
        self._journal.record(kind, joining, cause=self._left, seconds=seconds)
