"""Sends a call to the workers, and supervises each attempt until its end."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from raysgd._internal.context import Progress
from raysgd.cluster.serialization import sendable
from raysgd.cluster.streams import Inbox, offered
from raysgd.cluster.worker import Outcome
from raysgd.cluster.worker_handle import WorkerHandle
from raysgd.elastic.call import Call, LoadRequest
from raysgd.elastic.commands import Attempt
from raysgd.elastic.driver_context import DriverContext
from raysgd.elastic.health import HealthMonitor
from raysgd.elastic.machine import CallFailed, CallReturned, Event, RunCall, WorkersLost
from raysgd.elastic.policies import furthest, pause_step
from raysgd.errors import CollectiveError

logger = logging.getLogger(__name__)

_TICK_S = 1.0
_BUSY_TICK_S = 0.05
_UNEVEN_TICK_S = 0.25
_NOTICE_S = 0.1
"""Seconds between the request of a pause and the pause."""
_LONG_NOTICE_S = 1.0
"""The same delay for new shares, which are not urgent. A late request costs a new generation."""
_CHANGE_S = 10.0
"""Seconds that a call waits for the snapshot of a change. Large states arrive later."""


class CallRunner:
    """Runs the current call of a `DriverContext`, one attempt at a time."""

    def __init__(self, context: DriverContext) -> None:
        self._context = context
        self._group, self._clock = context.group, context.group.clock
        self._journal, self._commands = context.journal, context.commands
        self._reached = Progress()
        self._redo: Call | None = None
        self._num_changes = 0
        self.sent: dict[WorkerHandle, Future[Outcome]] | None = None
        """The call on each worker, or None before the first worker receives it."""
        self._attempt: Attempt | None = None
        self._split = 0
        """Number of micro-batches per batch in the next attempt; 0 for no change."""
        self.outcomes: list[Outcome] = []

    def save(self) -> None:
        """Take a snapshot, and let callbacks save at the next step."""
        self.sent, self._context.preemption.must_save = None, False
        self.rescue_state()
        self._context.call.at_once = True

    def rescue_state(self) -> None:
        """Fetch the newest state of the remaining workers as the snapshot."""
        if (progress := self._context.snapshots.rescue(self._commands)) is not None:
            self._journal.progress = progress

    def begin(self, call: Call) -> None:
        self._context.call, self._redo, self._split = call, None, 0
        # Committed steps count, even if a later step has left the state partial.
        self._reached = replace(self._journal.progress, partial=False)

    def end(self) -> None:
        self._context.call, self._redo, self.outcomes = Call(), None, []
        self.sent = self._attempt = None

    def is_behind(self) -> bool:
        """Whether steps were lost with all workers and a call can repeat them."""
        step, reached, call = self._journal.progress.global_step, self._reached, self._context.call
        if step >= reached.global_step:
            return False
        if self._redo is None and call.catch_up is not None:
            self._redo = call.catch_up(reached)
            if self._redo is not None:
                logger.warning(
                    "Steps %d to %d were lost with all workers. They run again before %s().",
                    step + 1,
                    reached.global_step,
                    call.name,
                )
        return self._redo is not None

    def run(self, action: RunCall) -> Event:
        """Make one attempt at the call. The attempt ends shortly after a failure."""
        self.sent = self._attempt = None
        if self._context.pause_step is not None:  # the last attempt ended early
            self._commands.pause_at(None)
            self._context.pause_step = None
        call, group = self._context.call, self._group
        if action.is_redo:
            assert self._redo is not None
            call = self._redo
        elif action.begins:
            call.begin(furthest([self._journal.progress, self._reached]))
        members = list(group.members if call.rank is None else [group.members[call.rank]])
        self._journal.seen_step = self._journal.progress.global_step
        packed: Any = call.request
        if call.rank is None:
            packed = packed.with_shares(self._context.shares.of(members))
        if self._split:
            packed = packed.with_split(self._split)
        if not group.options.inline:
            packed = sendable(f"the arguments of {call.name}", packed)
        self._context.check_open()
        with contextlib.ExitStack() as stack:
            arguments, inbox = [packed], None
            hosts = [member.info.node_ip for member in members]
            if call.receives is not None and not group.options.inline:
                inbox = stack.enter_context(Inbox(hosts, call.receives))
                arguments = [packed, inbox.address]
            elif isinstance(call.request, LoadRequest) and not group.options.inline:
                arguments = [stack.enter_context(offered(packed, hosts))]
            self.sent = {}
            for member in members:  # one by one, because Ctrl-C must find the calls that were sent
                self.sent[member] = member.work("call", *arguments)
            self._attempt = attempt = Attempt(self.sent, self._clock)
            self._watch(call, attempt)
            if attempt.failed:
                self._commands.stop(attempt)
        if inbox is not None:
            for outcome in attempt.outcomes.values():
                outcome.payload = inbox.take(outcome.payload)
        # Sort by rank, because only the snapshot of rank 0 has more than a shard.
        returned = [member for member in self._group.members if member in attempt.outcomes]
        progress = {member: attempt.outcomes[member].progress for member in returned}
        if progress:
            self._journal.progress = furthest(list(progress.values()))
            self._journal.seen_step = self._journal.progress.global_step
            self._context.preemption.poll(progress)
            self._context.shares.poll(progress)
        self._split = self._new_split(attempt)
        if attempt.lost:
            self._journal.lost = attempt.lost
            return WorkersLost()
        interrupted = attempt.interrupted_by_us
        if attempt.failed:
            is_stopped = interrupted and attempt.first_error is None
            can_repeat = call.has_batches or call.max_losses > 0
            may_repeat = bool(self._split) or (is_stopped and can_repeat)
            if not may_repeat:
                self._journal.error = attempt.error()
                if attempt.first_error is not None:
                    said = repr(self._journal.error)
                    self._journal.record("user_error", [attempt.first_error[0]], cause=said)
            return CallFailed(may_repeat=may_repeat)
        paused = any(outcome.kind == "paused" for outcome in attempt.outcomes.values())
        is_complete = not paused and not action.is_redo
        if is_complete:
            self._poll_snapshots(progress)
            self.outcomes = [attempt.outcomes[member] for member in members]
        return CallReturned(is_complete=is_complete, interrupted=interrupted)

    def _poll_snapshots(self, progress: Mapping[WorkerHandle, Progress]) -> None:
        """Fetch a newer snapshot. Wait for it if a restart could not repeat this call."""
        snapshots, before = self._context.snapshots, self._num_changes
        snapshots.poll(progress)
        self._num_changes = next((p.num_changes for p in progress.values()), before)
        if self._num_changes != before:
            self._clock.wait(snapshots.coming, _CHANGE_S)

    def _watch(self, call: Call, attempt: Attempt) -> None:
        monitor = HealthMonitor(attempt, self._journal.ranks, self._clock)
        while attempt.under_way:
            self._context.check_open()
            is_busy = call.on_wait is not None or self._context.scale_up.under_way
            idle_s = _UNEVEN_TICK_S if attempt.outcomes else _TICK_S
            if attempt.settle(_BUSY_TICK_S if is_busy else idle_s):
                continue
            if self._group.is_cut_off():
                continue  # the workers wait for the network too
            progress = self._commands.ask_progress()
            if call.on_wait is not None:
                call.on_wait(list(progress.values()))
            steps = [p.global_step for p in progress.values()]
            self._journal.seen_step = max([self._journal.seen_step, *steps])
            if call.has_batches:
                monitor.log_standstill(progress)
            if (why := monitor.blocked(progress)) is not None:
                raise CollectiveError(why)
            for feature in self._context.features:
                feature.poll(progress)
            if call.can_pause and self._context.pause_step is None:
                moves = any(self._context.who_moves()) or self._context.preemption.must_save
                if moves or self._context.shares.wants_change:
                    self._pause(attempt, progress, _NOTICE_S if moves else _LONG_NOTICE_S)

    def _pause(
        self, attempt: Attempt, progress: Mapping[WorkerHandle, Progress], notice_s: float
    ) -> None:
        """Let all workers pause at the same step, so that workers can join and leave."""
        if len(progress) < len(self._group.members) or attempt.outcomes:
            return  # a worker does not answer, or the call is ending
        if not all(p.step_s for p in progress.values()):
            return  # the step duration is unknown before the first step
        step = self._context.pause_step = pause_step(list(progress.values()), notice_s)
        answers = self._commands.pause_at(step)
        if not all(f.done() and f.exception() is None and f.result() < step for f in answers):
            # Some workers have passed the step: discard it.
            attempt.interrupted_by_us = True
            self._commands.stop(attempt)

    def abandon(self) -> None:
        """Stop the work after Ctrl-C, and request the progress of the workers."""
        pending = self.sent or {} if self._attempt is None else self._attempt.pending
        self._commands.busy |= pending
        self._commands.interrupt()
        if reached := list(self._commands.ask_progress().values()):
            self._journal.progress = furthest(reached)

    def _new_split(self, attempt: Attempt) -> int:
        """Return the number of micro-batches per batch if memory ran out, otherwise 0."""
        if attempt.first_error is None or not attempt.first_error[1].split:
            return 0
        member, outcome = attempt.first_error
        said = repr(outcome.value())
        self._journal.record("split", [member], cause=said, factor=outcome.split)
        return outcome.split
