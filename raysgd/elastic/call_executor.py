"""Sends a call to the workers, and supervises each attempt until its end."""

import contextlib
import logging
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from raysgd._internal.worker_status import ProcessStatus, ReportedPosition, WorkerStatus
from raysgd.cluster.clock import Clock
from raysgd.cluster.large_values import Inbox, serve_value
from raysgd.cluster.serialization import pack_as
from raysgd.cluster.worker import Worker
from raysgd.cluster.worker_handle import WorkerHandle
from raysgd.elastic.call import Call, LoadRequest
from raysgd.elastic.group_record import GroupRecord, list_ranks
from raysgd.elastic.group_rpc import (
    FAST_POLL_S,
    POLL_S,
    Attempt,
    AttemptResult,
    GroupRpc,
    results_of,
)
from raysgd.elastic.policies import choose_pause_step, newest_status
from raysgd.elastic.preemption import PreemptionMonitor
from raysgd.elastic.share_balancer import ShareBalancer
from raysgd.elastic.snapshot_keeper import SnapshotKeeper
from raysgd.elastic.speed_monitor import SpeedMonitor
from raysgd.elastic.worker_starter import WorkerStarter
from raysgd.errors import CollectiveError

logger = logging.getLogger(__name__)

_POLL_AT_END_S = 0.25  # after a worker has returned
_LEAD_S = 0.1
"""Seconds between the request of a pause and the pause."""
_LONG_LEAD_S = 1.0
"""The same time for new shares, which are not urgent. A late request costs a new generation."""
_HANG_S = 60.0
"""Seconds without a finished batch after which to log the stacks of all workers."""
_STACKS_S = 2.0
_BLOCKED_S = 0.7
"""Seconds that a blocked collective may take before the driver interrupts it."""


class HangDetector:
    """Watches one attempt at a call."""

    def __init__(self, attempt: Attempt, ranks: Mapping[WorkerHandle, int], clock: Clock) -> None:
        self._attempt, self._ranks, self._clock = attempt, ranks, clock
        self._progressed_at = self._clock.monotonic()  # or infinity after a log
        self._positions: dict[WorkerHandle, ReportedPosition] = {}
        self._collectives: dict[WorkerHandle, int | None] = {}
        self._waiting_since = 0.0

    def find_deadlock(self, statuses: Mapping[WorkerHandle, WorkerStatus]) -> str | None:
        """Return a message if workers wait in a collective that cannot end, otherwise None.

        A collective cannot end if each busy worker waits in one and all others have returned.
        """
        now = self._clock.monotonic()
        known, unknown = {m: p.process for m, p in statuses.items()}, ProcessStatus()
        waiting = {m: known.get(m, unknown).current_collective for m in self._attempt.pending}
        returned = [known.get(member, unknown) for member in self._attempt.outcomes]
        # A worker that has returned may have started a collective that is still running.
        are_idle = all(p.is_blocked_on_driver and p.current_collective is None for p in returned)
        if not (returned and are_idle) or None in waiting.values():
            self._collectives = {}
        elif waiting != self._collectives:
            self._collectives, self._waiting_since = waiting, now
        elif now - self._waiting_since >= _BLOCKED_S:
            return (
                f"Workers {list_ranks(self._ranks, waiting)} wait in a collective for workers "
                f"{list_ranks(self._ranks, self._attempt.outcomes)}, which have returned, or "
                "reported or saved more often. All workers must train, communicate, report, and "
                "save equally often and in the same order."
            )
        return None

    def log_hang(self, statuses: Mapping[WorkerHandle, WorkerStatus]) -> None:
        """Log the stacks of all workers if no batch has finished for long."""
        seen = {member: each.position for member, each in statuses.items()}
        now = self._clock.monotonic()
        if any(seen[member] != self._positions.get(member) for member in seen):
            self._positions, self._progressed_at = {**self._positions, **seen}, now
        waited_s = now - self._progressed_at
        if waited_s >= _HANG_S:
            self._progressed_at = math.inf
            futures = {m: m.submit_control(Worker.stacks) for m in self._attempt.pending}
            self._clock.wait(futures.values(), _STACKS_S)
            received, none = results_of(futures), "no answer: the process is stopped or gone"
            stacks = [
                f"Worker {self._ranks[member]} on {member.node_name}:\n{received.get(member, none)}"
                for member in futures
            ]
            logger.warning("No batch finished for %.0f s. %s", waited_s, "\n".join(stacks))


@dataclass(eq=False)
class RunningCall:
    """What `CallExecutor` keeps of the running call between its attempts."""

    call: Call  # with its newest goal
    attempt: Attempt | None = None
    """The newest attempt, or None before the first worker receives the call."""
    replay: Call | None = None
    """The call that repeats steps lost with all workers."""
    has_begun: bool = False
    """Whether the first attempt that is no replay has begun. All later losses cause retries."""
    num_early_losses: int = 0
    """Number of losses before the call began."""
    has_warned_of_replay: bool = False
    goal: Literal["due", "due with a save", "set"] = "due"
    """Whether the next attempt sets the goal of the call. See `CallExecutor._set_goal`."""


@dataclass(eq=False)
class CallExecutor:
    """Executes the running call, in attempts, and counts its losses."""

    record: GroupRecord
    rpc: GroupRpc
    starter: WorkerStarter
    preemption: PreemptionMonitor
    snapshots: SnapshotKeeper
    share_balancer: ShareBalancer
    speed: SpeedMonitor

    def __post_init__(self) -> None:
        self.group = self.record.group
        self.set_call(self.record.call)

    def set_call(self, call: Call) -> None:
        """Execute this call from now on. It is the running call."""
        self.record.begin_call(call)
        self.running = RunningCall(call)

    def count_loss(self) -> str:
        """Count a loss. Return why it ends the call, or an empty text."""
        running, call = self.running, self.record.call
        if running.has_begun:
            call.losses.num_losses += 1
            if call.losses.num_losses > (most := call.max_retries):
                return f"workers were lost in one call more often than max_retries={most}"
        else:
            running.num_early_losses += 1
            number, most = running.num_early_losses, self.starter.config.max_start_attempts
            if number > most:
                return f"workers were lost {number} times before the call began"
        return ""

    def observe(self, statuses: Mapping[WorkerHandle, WorkerStatus]) -> None:
        """Let the components observe the group, without waiting.

        They use the statuses of the members that answered, which are empty before a call.
        """
        self.snapshots.request_newer(statuses)
        self.preemption.observe(statuses)
        self.starter.advance_if_allowed()
        self.share_balancer.observe(statuses)
        self.speed.observe(statuses)

    def rescue_state(self) -> None:
        """Keep the state of a member that answers, if there is one. Its status counts."""
        self.record.set_newest_status(self.snapshots.rescue(self.rpc))

    def _find_replay(self) -> Call | None:
        """Return the call that repeats steps lost with all workers, or None."""
        running, call = self.running, self.record.call
        before = self.record.status_before.position
        step = self.record.newest_status.position.global_step
        can_repeat = call.has_batches or (call.make_replay and not call.replaces_state)
        if step >= before.global_step or not can_repeat:
            return None
        if not running.has_warned_of_replay:
            running.has_warned_of_replay = True
            logger.warning(
                "Steps %d to %d were lost with all workers. They run again, with the `info` and "
                "`dataset` of the newest call of train().",
                step + 1,
                before.global_step,
            )
        if running.replay is None and call.make_replay is not None:
            running.replay = call.make_replay(before)
        return running.replay

    def _set_goal(self) -> Call:
        """Return the running call with its goal. Set that if it is due, but not in a replay.

        ``due``: it is a new call. ``due with a save``: `PreemptionMonitor.must_save` has paused the
        call, and the driver has stored the state.
        """
        running, make_request = self.running, self.record.call.make_request
        if running.goal != "set" and make_request is not None:
            newest = newest_status([self.record.newest_status, self.record.status_before])
            request = make_request(newest.position, running.goal == "due with a save")
            running.call, running.goal = replace(running.call, request=request), "set"
        return running.call

    def run_attempt(self) -> AttemptResult:
        """Run one attempt at the call. The attempt ends shortly after a failure."""
        running, replay = self.running, self._find_replay()
        running.has_begun |= replay is None
        if self.preemption.must_save and self.record.call.can_pause:
            self.rescue_state()
            self.preemption.record_save()
            running.goal = "due with a save"
        min_splits = 0 if running.attempt is None else running.attempt.min_splits
        running.attempt = None
        if self.rpc.is_pausing:  # the last attempt has not reached its pause
            self.rpc.pause_at(None)
        call = replay or self._set_goal()
        members = self.group.members[:] if call.rank is None else [self.group.members[call.rank]]
        call.log_points.begin(self.record.newest_status.position.global_step, members)
        if call.rank is None:
            shares = self.share_balancer.choose_for(members)
            call = replace(call, request=call.request.for_attempt(shares, min_splits))
        with contextlib.ExitStack() as stack:
            packed, inbox = self._pack_request(call, members, stack)
            running.attempt = attempt = Attempt({}, self.group.clock)
            for member in members:  # one by one, because Ctrl-C must find the calls that were sent
                future = member.submit_work(Worker.handle, packed, inbox and inbox.expect())
                attempt.add(member, future)
            polled = self._watch(call, attempt)
            if attempt.has_failed:
                self.rpc.interrupt_survivors(attempt)
        if inbox is not None:
            for outcome in attempt.outcomes.values():
                outcome.payload = inbox.resolve(outcome.payload)
        return self._end_attempt(call, replay is not None, attempt, polled)

    def _pack_request(
        self, call: Call, members: Sequence[WorkerHandle], stack: contextlib.ExitStack
    ) -> tuple[Any, Inbox | None]:
        """Return the packed request, and the inbox of large answers. `stack` closes both."""
        request = call.request
        if self.group.options.is_inline:
            if call.on_progress is not None or call.log_points.on_log is not None:
                stack.enter_context(self._showing_progress(call))
            return request, None
        packed = pack_as(f"the arguments of {call.name}", request)
        self.rpc.check_open()
        hosts = [member.location.node_ip for member in members]
        if isinstance(request, LoadRequest):
            return stack.enter_context(serve_value(packed, hosts)), None
        inbox = call.open_inbox and stack.enter_context(call.open_inbox(hosts))
        return packed, inbox

    def _end_attempt(
        self, call: Call, is_replay: bool, attempt: Attempt, polled: WorkerStatus | None
    ) -> AttemptResult:
        """Let the components observe the group after an attempt, and return its result."""
        # Sort by rank, because only the snapshot of rank 0 has more than a shard.
        known = attempt.outcomes
        statuses = {m: known[m].status for m in self.group.members if m in known}
        call.log_points.add(statuses, self.group.members)
        self.record.set_newest_status(*(statuses.values() or [polled]))
        if statuses:
            self.observe(statuses)
        result = attempt.make_result(is_replay, can_repeat=call.has_batches or call.max_retries > 0)
        if result.outcomes is not None:
            self.snapshots.await_changed_snapshot()
        if attempt.first_user_error is not None:
            member, outcome = attempt.first_user_error
            if num_splits := attempt.min_splits:
                cause = repr(outcome.unpack())
                self.record.add_event("out_of_memory", [member], cause=cause, num_splits=num_splits)
            elif result.error is not None:
                self.record.add_event("user_error", [member], cause=repr(result.error))
        return result

    @contextlib.contextmanager
    def _showing_progress(self, call: Call) -> Iterator[None]:
        """Show the progress from a thread, because this thread is that of the only worker."""
        ended = threading.Event()

        def poll() -> None:
            while not ended.wait(POLL_S):
                self.speed.observe(self._poll_status(call))

        thread = threading.Thread(target=poll, name="raysgd-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _poll_status(self, call: Call) -> Mapping[WorkerHandle, WorkerStatus]:
        """Return the statuses of the members that answer, and show their progress."""
        statuses = self.rpc.poll_status(call.log_points.acknowledged_step)
        if call.on_progress is not None:
            call.on_progress([each.batches for each in statuses.values()])
        call.log_points.add(statuses, self.group.members)
        return statuses

    def _watch(self, call: Call, attempt: Attempt) -> WorkerStatus | None:
        """Wait for the end of an attempt. Return the newest polled status."""
        monitor = HangDetector(attempt, self.record.ranks, self.group.clock)
        newest = None
        while attempt.is_running:
            self.rpc.check_open()
            is_busy = call.on_progress is not None or self.starter.num_started()
            idle_s = _POLL_AT_END_S if attempt.outcomes else POLL_S
            if attempt.collect(FAST_POLL_S if is_busy else idle_s):
                continue
            if self.group.is_cut_off():
                continue  # the workers wait for the network too
            statuses = self._poll_status(call)
            if statuses:
                newest = newest_status([p for p in (newest, *statuses.values()) if p])
            if call.has_batches:
                monitor.log_hang(statuses)
            if (why := monitor.find_deadlock(statuses)) is not None:
                raise CollectiveError(why)
            self.observe(statuses)
            if call.can_pause and not self.rpc.is_pausing:
                is_urgent = any(self.starter.membership_changes()) or self.preemption.must_save
                if is_urgent or self.share_balancer.wants_change:
                    self._pause(attempt, statuses, _LEAD_S if is_urgent else _LONG_LEAD_S)
        return newest

    def _pause(
        self, attempt: Attempt, statuses: Mapping[WorkerHandle, WorkerStatus], lead_s: float
    ) -> None:
        """Let all workers pause at the same step, so that workers can join and leave."""
        if len(statuses) < len(self.group.members) or attempt.outcomes:
            return  # a worker does not answer, or the call is ending
        if not all(p.measured.step_s for p in statuses.values()):
            return  # the step duration is unknown before the first step
        step = choose_pause_step(list(statuses.values()), lead_s)
        steps = self.rpc.pause_at(step).values()
        if len(steps) < len(statuses) or max(steps) >= step:
            attempt.why_new_generation = CollectiveError("Some workers have passed the pause step.")
