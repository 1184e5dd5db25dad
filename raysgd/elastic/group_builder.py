"""The group of each new generation: of a start, a restart, or a rejoin."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from raysgd._internal.worker_status import WorkerStatus
from raysgd.cluster.large_values import serve_value
from raysgd.cluster.serialization import pack_as
from raysgd.cluster.worker import Outcome, Worker
from raysgd.cluster.worker_handle import WorkerHandle
from raysgd.comm.backend import CollectiveBackend
from raysgd.elastic import policies
from raysgd.elastic.call import ExportShardsRequest, ImportShardsRequest, LoadRequest
from raysgd.elastic.events import EventKind
from raysgd.elastic.group_record import GroupRecord, list_ranks
from raysgd.elastic.group_rpc import (
    ANSWER_S,
    FAST_POLL_S,
    POLL_S,
    Attempt,
    AttemptResult,
    GroupRpc,
    LostWorkers,
)
from raysgd.elastic.share_balancer import ShareBalancer
from raysgd.elastic.snapshot_keeper import SnapshotKeeper
from raysgd.elastic.worker_starter import WorkerStarter
from raysgd.errors import CollectiveError, WorkerLostError, WorkerTimeoutError

logger = logging.getLogger(__name__)

NO_SNAPSHOT = (
    "and there is no snapshot to restart from (snapshot_every=None). To continue, load a "
    "checkpoint: trainer.load(path)"
)
_MAX_FAILED_REJOINS = 2
"""Maximum number of consecutive failures to form a process group while all workers are alive."""
_STRAGGLER_S = 60.0
"""Seconds that the next call waits for workers that are busy with a failed call."""
_RESTART_STRAGGLER_S = 5.0
"""The same limit in seconds for training functions, whose workers restart from a checkpoint."""
_LOG_WAIT_EVERY_S = 30.0
"""Seconds after which to log what a start or a rejoin is waiting for."""
_START_INTERVAL_S = 0.01


@dataclass(eq=False)
class GroupBuilder:
    """Moves workers into new generations."""

    record: GroupRecord
    rpc: GroupRpc
    starter: WorkerStarter
    snapshots: SnapshotKeeper
    share_balancer: ShareBalancer
    backend: CollectiveBackend | None
    on_start: Callable[[], None]
    """Called after all workers have started, before they load a snapshot."""
    _num_failed_rejoins: int = 0  # in a row, while all workers were alive

    def __post_init__(self) -> None:
        self.group, self.policy = self.record.group, self.record.policy

    # ---- rejoins

    def rejoin(self) -> AttemptResult:
        """Form the next generation of the members, and of replacement workers that are ready."""
        began = self.group.clock.monotonic()
        if lost := self._await_unfinished():
            return AttemptResult("broken", lost=self._discard_lost(lost))
        joining, leaving = self.starter.membership_changes()
        statuses, lost = self.rpc.probe_or_kill([*self.group.members, *joining])
        if lost:
            return AttemptResult("broken", lost=self._discard_lost(lost))
        self.share_balancer.observe(statuses)
        of_members = {member: statuses[member] for member in self.group.members}
        leader, staying = policies.choose_leader(of_members, leaving)
        self.record.set_newest_status(statuses[leader])
        if self._lacks_good_state(statuses[leader]):
            return self._give_up_state("a failed step has changed the parameters of all workers")
        if not set(leaving).isdisjoint(staying):
            joining = []  # the leaving workers keep their ranks
        self._rescue_shards(staying)
        next_members = self.group.sort_by_node([*staying, *joining])
        attempt = self._join(next_members, next_members.index(leader))
        if any(each.status.state_status.condition == "lost" for each in attempt.outcomes.values()):
            return self._give_up_state("all copies of some shards of the state are lost")
        if attempt.has_failed:
            return self._handle_failed_rejoin(attempt, joining)
        self._replace_members(next_members, joining, began)
        for warning in filter(None, {each.unpack() for each in attempt.outcomes.values()}):
            logger.warning("%s", warning)
        return AttemptResult("ready")

    def _await_unfinished(self) -> LostWorkers:
        """Wait for workers that are busy with a failed call. Return the lost ones."""
        rpc, supports_live_join = self.rpc, self.policy.supports_live_join
        # A worker that holds the GIL receives its interruption late.
        _, silent = rpc.probe_or_kill(rpc.unfinished if supports_live_join else ())
        patience_s = _STRAGGLER_S if supports_live_join else _RESTART_STRAGGLER_S
        return silent or rpc.await_unfinished(patience_s)

    def _handle_failed_rejoin(
        self, attempt: Attempt, joining: Sequence[WorkerHandle]
    ) -> AttemptResult:
        # If no worker is lost, discard all replacements, because one may be the cause.
        if lost := attempt.lost or dict.fromkeys(joining, attempt.make_error()):
            return AttemptResult("broken", lost=self._discard_lost(lost))
        error = attempt.make_error()
        if isinstance(error, CollectiveError):
            logger.warning("The workers could not form a process group: %s", error)
            self._num_failed_rejoins += 1
            if self._num_failed_rejoins <= _MAX_FAILED_REJOINS:
                return AttemptResult("broken")
        return AttemptResult("broken", error=error)

    def _give_up_state(self, why: str) -> AttemptResult:
        """Stop all workers, because none has a usable state."""
        if not (self.policy.keeps_snapshots or self.record.call.replaces_state):
            raise self.record.make_error(f"{why}, {NO_SNAPSHOT}")
        logger.warning(
            "All workers restart from the snapshot, or from setup() without one: %s.", why
        )
        self.discard_all()
        return AttemptResult("broken")

    def _lacks_good_state(self, of_leader: WorkerStatus) -> bool:
        """Return whether the newest state is damaged, and all workers can restart from another."""
        # Without a snapshot, remote workers start again from `setup`.
        has_other = self.snapshots.store_arrived() or not self.group.options.is_inline
        may_restart = self.policy.keeps_snapshots and not self.record.call.replaces_state
        return of_leader.state_status.condition == "damaged" and has_other and may_restart

    def _rescue_shards(self, staying: Sequence[WorkerHandle]) -> None:
        """Copy shards of the workers that leave to one that stays, if there may be no others."""
        if self.record.has_shards:
            leaving = [member for member in self.group.members if member not in staying]
            for outcome in self.rpc.send_to_idle(leaving, ExportShardsRequest()).values():
                if (shards := outcome.unpack()) is not None:
                    self.rpc.send_to_idle([staying[0]], ImportShardsRequest(shards=shards))

    def _replace_members(
        self, next_members: Sequence[WorkerHandle], joining: Sequence[WorkerHandle], began: float
    ) -> None:
        """Make a new generation the group, and release the workers that leave."""
        leaving = [member for member in self.group.members if member not in next_members]
        self.group.members[:] = next_members
        self.record.assign_ranks(next_members)
        self.starter.forget_joined(joining)
        seconds = self.group.clock.monotonic() - began
        self.collect_metrics(leaving)
        self.group.discard(*leaving)
        cause = "; ".join(f"a worker has left {member.node_name}" for member in leaving)
        kind: EventKind = ("drained" if cause else "grown") if joining else "regrouped"
        self.record.add_event(kind, joining or next_members, cause=cause, seconds=seconds)

    def collect_metrics(self, members: Sequence[WorkerHandle]) -> None:
        """Request the call's metrics from workers that are about to stop."""
        call = self.record.call
        if call.leaving_metrics_request is None or not members:
            return
        outcomes = self.rpc.send_to_idle(members, call.leaving_metrics_request, ANSWER_S)
        if silent := [member.node_name for member in members if member not in outcomes]:
            logger.warning(
                "The result of %s() lacks the metrics of workers that leave %s. They did not "
                "arrive in time.",
                call.name,
                ", ".join(silent),
            )
        call.leaving_outcomes.extend(e for e in outcomes.values() if e.unpack() is not None)
        call.log_points.add({member: each.status for member, each in outcomes.items()}, ())

    # ---- starts

    def restart(self) -> None:
        """Stop the members, and form a group of new workers, with the state of the snapshot."""
        began, is_first = self.group.clock.monotonic(), self.record.is_first_start
        why = "; ".join(f"a worker has left {each.node_name}" for each in self.group.preempted())
        num_before = len(self.group.members)
        self.group.discard(*self.group.members)
        self.starter.begin_start()
        while not self._start_group():
            pass  # the next attempt replaces the lost workers
        members = self.group.members
        if is_first:
            self.record.add_event("started", members)
            return
        has_grown = 0 < num_before < len(members)
        kind: EventKind = "grown" if has_grown else "restarted"
        if why and len(members) >= num_before:
            kind = "drained"
        seconds = self.group.clock.monotonic() - began
        concerned = members[num_before:] if has_grown else members
        self.record.add_event(kind, concerned, cause=why, seconds=seconds)

    def await_workers(self) -> None:
        """Wait until there are enough workers. Each wait for resources is longer than the last."""
        num_members, starting = len(self.group.members), not self.group.members
        num_required, missing = self.record.num_required, self.record.describe_shortage()
        deadline, num_waits, enough_at = 0.0, 0, math.inf
        while True:
            self.rpc.check_open()
            self.starter.advance(starting)
            if starting and (error := self.starter.error) is not None:
                if isinstance(error, WorkerLostError) and self.record.call.losses.causes:
                    raise self.record.make_error(str(error), cause=error)
                raise error
            now = self.group.clock.monotonic()
            if num_members + len(self.starter.ready_workers()) >= num_required:
                enough_at = min(enough_at, now)
                if now >= enough_at + self.starter.grace_s():
                    return
            is_short = num_members + self.starter.num_started() < num_required
            if is_short and now >= deadline and not self.group.notices.is_ray_silent():
                room, error = self.group.describe_demand(), self.starter.error
                failure = f"{missing}, and replacements fail: {error}"
                if num_waits == self.policy.elastic.max_start_attempts:
                    why = f"{missing}, and the resources for more are not free: {room}"
                    raise self.record.make_error(failure if error else why, cause=error)
                wait_s = policies.backoff_s(num_waits, self.policy.elastic)
                cause = failure if error else f"{missing}, and {room}"
                self.record.add_event("waiting", [], cause=cause, seconds=wait_s)
                deadline, num_waits = now + wait_s, num_waits + 1
            self.group.clock.sleep(_START_INTERVAL_S if starting else FAST_POLL_S)

    def _start_group(self) -> bool:
        """Wait for workers, and form a group of them. Return whether none was lost."""
        self.await_workers()
        joining = self.starter.ready_workers()
        _, lost = self.rpc.probe_or_kill(joining)
        if lost:
            self._discard_lost(lost)
            return False
        members = self.group.sort_by_node(sorted(joining, key=lambda member: member.is_remote))
        self.record.assign_ranks(members)
        status = WorkerStatus()
        for attempt in self._start_stages(members):
            if attempt.has_failed:
                self._handle_failed_start(attempt, members)
                return False
            status = attempt.outcomes[members[0]].status
        # All workers repeat the steps after the snapshot, also those of workers that left.
        self.record.set_newest_status(status)
        step, results = status.position.global_step, self.record.call.leaving_outcomes
        results[:] = [each for each in results if each.status.position.global_step <= step]
        self.starter.forget_joined(members)
        if not self.starter.may_join_later:
            self.starter.discard_pending()
        return True

    def _start_stages(self, members: Sequence[WorkerHandle]) -> Iterator[Attempt]:
        """Start a group, and yield the attempt of each stage."""
        leader = None if self.starter.sets_up_together else 0
        if leader is not None:  # the other workers get the snapshot from the leader
            yield from self._load_snapshot(members[:1])
        yield self._join(members, leader)
        self.group.members[:] = members
        self.on_start()
        if leader is None:
            yield from self._load_snapshot(members)

    def _load_snapshot(self, members: Sequence[WorkerHandle]) -> Iterator[Attempt]:
        state = None if self.record.call.replaces_state else self.snapshots.load()
        if state is None:
            return
        packed = pack_as("the snapshot", LoadRequest(state=dict(state)))
        with serve_value(packed, [member.location.node_ip for member in members]) as offer:
            futures = {member: member.submit_work(Worker.handle, offer) for member in members}
            attempt = self._await_stage(futures, "load")
        yield attempt

    def _handle_failed_start(self, attempt: Attempt, members: Sequence[WorkerHandle]) -> None:
        """Discard the lost workers of a start, and keep the others. Raise any other failure."""
        if not attempt.lost:
            raise attempt.make_error()
        # Replace processes that `_on_start` may have changed, or that can join only one group.
        are_used = bool(self.group.members) or not self.policy.process_can_rejoin
        self.group.members.clear()
        _, lost = self.rpc.probe_or_kill([m for m in members if m not in attempt.lost])
        self._discard_lost(attempt.lost | lost)
        if are_used:
            self.starter.discard_pending(members)
        self.record.generation += 1  # a late interruption of this one must not reach later work

    # ---- both

    def discard_all(self) -> None:
        """Stop all members and replacement workers."""
        self.starter.discard_pending()
        self.group.discard(*self.group.members)

    def _discard_lost(self, lost: LostWorkers) -> LostWorkers:
        """Discard lost pending workers. Return the lost members."""
        return {m: e for m, e in lost.items() if not self.starter.discard_failed(m, e)}

    def _join(self, members: Sequence[WorkerHandle], leader: int | None) -> Attempt:
        """Move workers into the next generation, with the state of rank `leader`.

        Without a leader, they run their setup.
        """
        self.record.generation += 1
        assigned = policies.assign_contexts(
            [member.location for member in members],
            generation=self.record.generation,
            has_process_group=self.backend is not None,
            num_cpus=self.group.options.num_cpus,
        )
        shares = self.share_balancer.configured_for(members)
        contexts = {m: replace(c, shares=shares) for m, c in zip(members, assigned, strict=True)}
        addresses = [member.location.node_ip for member in members]
        rendezvous = self.backend and self.backend.create_rendezvous(addresses)
        if leader is None:
            self.starter.record_set_up(contexts)
            futures = {m: m.submit_work(Worker.setup, c, rendezvous) for m, c in contexts.items()}
            attempt = self._await_stage(futures, "set up")
        else:
            futures = {
                m: m.submit_work(Worker.rejoin, c, rendezvous, leader) for m, c in contexts.items()
            }
            attempt = self._await_stage(futures, "join a new generation")
        if not attempt.has_failed:
            self._num_failed_rejoins = 0
            if self.backend is not None:
                self.backend.release_rendezvous()
        return attempt

    def _await_stage(self, futures: Mapping[WorkerHandle, Future[Outcome]], task: str) -> Attempt:
        """Wait for one stage of a start or a rejoin, up to `timeout_s`."""
        attempt, timeout_s = Attempt(futures, self.group.clock), self.rpc.timeout_s
        now = self.group.clock.monotonic
        deadline, log_at = now() + timeout_s, now() + _LOG_WAIT_EVERY_S
        is_late = False
        while attempt.is_running and not is_late:
            attempt.collect(POLL_S)
            self.rpc.check_open()
            if now() > log_at:
                log_at += _LOG_WAIT_EVERY_S
                waiting = list_ranks(self.record.ranks, attempt.pending)
                logger.warning("Still waiting for workers %s to %s.", waiting, task)
            is_late = now() > deadline and not self.group.is_cut_off()
        waiting = list_ranks(self.record.ranks, attempt.pending)
        if is_late or attempt.has_failed:
            if self.backend is not None:
                self.backend.close()  # wakes workers that still wait for each other
            self.rpc.interrupt_survivors(attempt)
        if is_late:
            raise WorkerTimeoutError(
                f"Workers {waiting} took longer than {timeout_s:g} s (timeout_s) to {task}."
            )
        return attempt
