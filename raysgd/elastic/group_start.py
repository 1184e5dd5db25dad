"""Starts and restarts of all workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from raysgd._internal.context import Progress
from raysgd.cluster.large_values import offering
from raysgd.cluster.serialization import pack_as
from raysgd.cluster.worker import Worker
from raysgd.cluster.worker_handle import WorkerHandle
from raysgd.elastic import machine
from raysgd.elastic.call import LoadRequest
from raysgd.elastic.commands import BUSY_TICK_S, Attempt
from raysgd.elastic.driver_context import DriverContext
from raysgd.elastic.events import EventKind
from raysgd.elastic.generation import GroupForming
from raysgd.elastic.policies import backoff_s
from raysgd.errors import WorkerLostError

_START_TICK_S = 0.01


class GroupStart:
    """Starts all workers, with the state of the snapshot if there is one."""

    def __init__(self, context: DriverContext, forming: GroupForming) -> None:
        self._context, self._forming = context, forming
        self._group, self._clock = context.group, context.group.clock
        self._journal, self._commands = context.journal, context.commands
        self._scale_up = context.scale_up
        self.on_start: Callable[[], None] | None = None
        """Called after all workers have started, before they load a snapshot."""

    def restart(self, min_workers: int) -> machine.GroupEvent:
        """Stop the members, and form a group of new workers, with the state of the snapshot."""
        began, is_first = self._clock.monotonic(), self._scale_up.is_first
        why = "; ".join(f"a worker has left {member.name}" for member in self._group.leaving())
        num_before, progress = len(self._group.members), None
        self._context.discard_members()
        self._scale_up.begin()
        while progress is None:
            self.await_workers(min_workers)
            progress = self._start_group()
        members, step = self._group.members, progress.global_step
        if is_first:
            self._journal.record("started", members, step=step)
            return machine.GroupFormed(progress=progress)
        has_grown = 0 < num_before < len(members)
        kind: EventKind = "grown" if has_grown else "restarted"
        if why and len(members) >= num_before:
            kind = "moved"
        joining, seconds = members[num_before:], self._clock.monotonic() - began
        concerned = joining if has_grown else members
        self._journal.record(kind, concerned, cause=why, step=step, seconds=seconds)
        return machine.GroupFormed(progress=progress)

    def await_workers(self, min_workers: int) -> None:
        """Wait until there are enough workers. Each wait for resources is longer than the last."""
        config, call = self._context.elastic, self._context.call
        num_members, starting = len(self._group.members), not self._group.members
        missing = machine.too_few(num_members, min_workers)
        deadline, num_waits = 0.0, 0
        while True:
            self._context.check_open()
            self._scale_up.tick(starting)
            if starting and (error := self._scale_up.error) is not None:
                if isinstance(error, WorkerLostError) and call.causes:
                    raise self._journal.failure(call, str(error), cause=error)
                raise error
            if self._scale_up.decide_start(min_workers):
                return
            now = self._clock.monotonic()
            is_short = num_members + self._scale_up.num_started() < min_workers
            if is_short and now >= deadline and not self._group.notices.is_ray_silent:
                room = self._group.room()
                if num_waits == config.max_attempts:
                    why = f"{missing}, and the resources for more are not free: {room}"
                    raise self._journal.failure(call, why)
                wait_s = backoff_s(num_waits, config)
                cause = f"{missing}, and {room}"
                self._journal.record("waiting", [], cause=cause, seconds=wait_s)
                deadline, num_waits = now + wait_s, num_waits + 1
            self._clock.sleep(_START_TICK_S if starting else BUSY_TICK_S)

    def _start_group(self) -> Progress | None:
        """Form a group of the ready workers, and return its progress. None if a worker was lost."""
        joining = self._scale_up.ready()
        _, lost = self._commands.probe_or_kill(joining)
        if lost:
            self._forming.note_lost(lost)
            return None
        members = self._group.in_order(sorted(joining, key=lambda member: member.remote))
        self._journal.assign_ranks(members)
        progress = Progress()
        for has_loaded, attempt in self._phases(members):
            if attempt.failed:
                self._discard_lost(attempt, members)
                return None
            if has_loaded:
                progress = attempt.outcomes[members[0]].progress
        # All workers repeat the steps after the snapshot, also those of departed workers.
        results, step = self._context.call.departed_results, progress.global_step
        results[:] = [each for each in results if each.progress.global_step <= step]
        self._scale_up.forget_joined(members)
        if not (self._context.policy.survivors_stay and self._context.elastic.grow):
            self._scale_up.drop()  # late workers could never join
        self._scale_up.set_up_alone()
        return progress

    def _phases(self, members: Sequence[WorkerHandle]) -> Iterator[tuple[bool, Attempt]]:
        """Start a group. Yield whether a phase has loaded the snapshot, and its attempt."""
        leader = None if self._scale_up.together else 0
        if leader is not None:  # the other workers get the snapshot from the leader
            yield from self._load_snapshot(members[:1])
        yield False, self._forming.join(members, leader)
        self._group.members[:] = members
        if self.on_start is not None:
            self.on_start()
        if leader is None:
            yield from self._load_snapshot(members)

    def _load_snapshot(self, members: Sequence[WorkerHandle]) -> Iterator[tuple[bool, Attempt]]:
        if self._context.call.replaces_state or (state := self._context.snapshots.state()) is None:
            return
        packed = pack_as("the snapshot", LoadRequest(state=dict(state)))
        with offering(packed, [member.info.node_ip for member in members]) as offer:
            calls = {member: member.work(Worker.call, offer) for member in members}
            attempt = self._forming.await_phase(calls, "load")
        yield True, attempt

    def _discard_lost(self, attempt: Attempt, members: Sequence[WorkerHandle]) -> None:
        """Discard the lost workers of a start, and keep the others. Raise any other failure."""
        if not attempt.lost:
            raise attempt.error()
        # Replace processes that `on_start` may have changed, or that can join only one group.
        are_used = bool(self._group.members) or not self._context.policy.process_can_rejoin
        self._group.members.clear()
        _, lost = self._commands.probe_or_kill([m for m in members if m not in attempt.lost])
        self._forming.note_lost(attempt.lost | lost)
        if are_used:
            self._scale_up.drop(members)
        self._scale_up.set_up_alone()
        self._journal.generation += 1  # a late interruption of this one must not reach later work
