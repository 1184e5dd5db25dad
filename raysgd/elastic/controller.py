"""Runs calls on all workers of a group, through failures.

`Controller._repair` decides what the group needs next. Workers only answer: `WorkerStarter` and
`GroupBuilder` call `create_runner`, `setup`, and `rejoin` of a `Worker`, `CallExecutor` sends each
attempt at a call to `handle`, and `GroupRpc` sends other requests, and control messages such as
`interrupt`. After the loss of a worker, for example::

    run_attempt → _remove_lost → rejoin → run_attempt
"""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from raysgd._internal.runner import Request, Runner
from raysgd._internal.tracebacks import release_callers
from raysgd.cluster.actor_group import ActorGroup
from raysgd.cluster.serialization import pack_as
from raysgd.cluster.worker_handle import cause_of
from raysgd.comm.backend import CollectiveBackend
from raysgd.elastic.call import Call
from raysgd.elastic.call_executor import CallExecutor
from raysgd.elastic.config import ElasticConfig
from raysgd.elastic.group_builder import NO_SNAPSHOT, GroupBuilder
from raysgd.elastic.group_record import GroupRecord
from raysgd.elastic.group_rpc import AttemptResult, GroupRpc, GroupStatus, LostWorkers
from raysgd.elastic.policies import RecoveryPolicy
from raysgd.elastic.preemption import PreemptionMonitor
from raysgd.elastic.share_balancer import ShareBalancer
from raysgd.elastic.snapshot_keeper import SnapshotKeeper
from raysgd.elastic.speed_monitor import SpeedMonitor
from raysgd.elastic.worker_starter import WorkerStarter

logger = logging.getLogger(__name__)

_SHUT_DOWN = "The workers are shut down."


class Controller:
    """Repairs the group, and runs calls on it.

    `backend` is None with one worker. Each worker calls `hook` first. `timeout_s` limits the setup
    and the joining of a generation. With `supports_live_join`, replacement workers can join during
    a call, as with operators. Otherwise workers are added only by a restart: after a loss, or in
    `restart_with_more_workers`. `on_start` is called after all workers have started, before they
    load a snapshot.
    """

    def __init__(
        self,
        group: ActorGroup,
        runner: Runner,
        backend: CollectiveBackend | None,
        hook: Callable[[], None] | None,
        timeout_s: float,
        elastic: ElasticConfig | None = None,
        supports_live_join: bool = True,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self.group_status: GroupStatus = "broken"
        self.is_shut_down = False
        self._call_lock = threading.Lock()
        self._pid = os.getpid()
        self._group, self.members = group, group.members
        elastic = elastic or ElasticConfig()
        group.watch_hosts(elastic.driver_grace_s, interrupts_calls=supports_live_join)
        self._policy = policy = RecoveryPolicy(
            elastic=elastic,
            process_can_rejoin=backend is None or backend.process_can_rejoin,
            supports_live_join=supports_live_join,
            replaces_workers=elastic.replace_workers and not group.options.is_inline,
            keeps_snapshots=elastic.snapshot_every is not None,
        )
        # Pickle here, so that an error is raised before a worker starts.
        created: dict[str, Any]
        created = {"initialization_hook": hook, "the runner": runner, "backend": backend}
        if not group.options.is_inline:
            created = {name: pack_as(name, value) for name, value in created.items()}
        arguments = (*created.values(), sys.path)
        self.record = record = GroupRecord(group, policy)
        self.events, self._backend = record.events, backend
        self.snapshots, self.speed = snapshots, speed = SnapshotKeeper(group), SpeedMonitor(group)
        self._rpc = rpc = GroupRpc(record, self._check_open, timeout_s)
        self._preemption = preemption = PreemptionMonitor(record)
        self._starter = starter = WorkerStarter(record, preemption, arguments, timeout_s)
        shares = ShareBalancer(record)
        self._builder = GroupBuilder(record, rpc, starter, snapshots, shares, backend, on_start)
        self._executor = CallExecutor(record, rpc, starter, preemption, snapshots, shares, speed)
        self._awaits_load = False
        """Whether the workers have the state of their setup, because a load follows."""

    # ---- lifecycle

    def start(self) -> None:
        """Start the workers and set them up. If that fails, stop them."""
        try:
            with self._aborting_on_error():
                self._group.reserve()
                self._restart()
        except BaseException:
            self.shutdown(force=True)
            raise

    def shutdown(self, force: bool = False) -> None:
        self.is_shut_down = True
        self._release(force or self.group_status != "ready")

    def _release(self, force: bool) -> None:
        if os.getpid() != self._pid:  # the workers belong to the parent process
            return
        with contextlib.ExitStack() as releasing:  # all of it, also after an error
            if self._backend is not None:
                releasing.callback(self._backend.close)
            releasing.callback(self._group.shutdown, force)
            self.snapshots.replace_with()
            self._starter.discard_pending()

    @contextlib.contextmanager
    def _aborting_on_error(self) -> Iterator[None]:
        """Clean up after an exception, such as Ctrl-C, or after a `shutdown` in another thread."""
        try:
            yield
        except BaseException as error:
            if not self.is_shut_down:
                self._abort_attempt(error)
            elif isinstance(error, Exception) and error.args != (_SHUT_DOWN,):
                raise RuntimeError(_SHUT_DOWN) from error
            release_callers(error)
            raise
        finally:
            if self.is_shut_down:
                self._release(force=True)

    def _check_open(self) -> None:
        self.check_process()
        if self.is_shut_down:
            raise RuntimeError(_SHUT_DOWN)

    def check_process(self) -> None:
        """Check that this process is not a fork."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                "This process was forked from the process of the trainer, so it cannot reach the "
                "workers. Start it with the spawn method, and create a trainer in it."
            )

    def _abort_attempt(self, error: BaseException) -> None:
        attempt = self._executor.running.attempt
        if self.group_status == "running":
            self.group_status = "ready" if attempt is None else "broken"
            if attempt is not None:
                self._rpc.interrupt(attempt)
                self.record.set_newest_status(*self._rpc.poll_status().values())
        if attempt is not None and isinstance(error, KeyboardInterrupt):
            self.record.interrupt_call()

    # ---- supervision

    def _run_attempts(self) -> AttemptResult:
        """Repair the group and send it the call, until the call has returned or failed."""
        while True:
            if (result := self._repair()) is None:
                self.group_status = "running"
                result = self._executor.run_attempt()  # here: short tracebacks of users
            self.group_status = result.group_status
            self._check_open()  # a shutdown in another thread loses no worker
            if result.lost:
                self._remove_lost(result.lost)
            if result.error is not None or result.outcomes is not None:
                return result

    def _repair(self) -> AttemptResult | None:
        """Take the next step of a repair. Return None if the group needs none."""
        builder, policy, num_workers = self._builder, self._policy, len(self.members)
        self._executor.observe({})
        joining, leaving = self._starter.membership_changes()
        if not num_workers:
            return self._restart()
        if num_workers + len(joining) < self.record.num_required:
            if not policy.replaces_workers:
                why = "and replace_workers=False starts no replacements"
                raise self.record.make_error(f"{self.record.describe_shortage()}, {why}")
            builder.await_workers()
            return AttemptResult(self.group_status)
        if self.group_status == "ready" and not joining and not leaving:
            return None
        self.group_status = "broken"
        if policy.process_can_rejoin and len(leaving) < num_workers:
            return builder.rejoin()
        if leaving:
            builder.collect_metrics(self.members)
        if leaving or policy.rescues_state:
            self._executor.rescue_state()
        return self._restart()

    def _restart(self) -> AttemptResult:
        """Stop the members, and start all workers, with the state of the snapshot."""
        if not self.can_restart():
            raise self.record.make_error(f"all workers are lost, {NO_SNAPSHOT}")
        self.group_status, self._awaits_load = "broken", self.record.call.replaces_state
        before = self.record.newest_status
        try:
            self._builder.restart()
        except BaseException:  # the next call restarts again, and repeats the lost steps
            self.record.set_newest_status(before)
            self._builder.discard_all()
            raise
        self.group_status = "ready"
        return AttemptResult(self.group_status)

    def _remove_lost(self, lost: LostWorkers) -> None:
        """Remove lost workers from the group. Raise an error if the call tolerates no more."""
        for member, error in lost.items():
            self.record.add_event("lost", [member], cause=cause_of(member, error))
            self._starter.expect_replacement(member)
            self._group.discard(member)
        if self._policy.rescues_state:
            self._executor.rescue_state()
        if not self._policy.survivors_stay:
            self._builder.discard_all()
        if why := self._executor.count_loss():
            self._starter.advance_if_allowed()
            raise self.record.make_error(why, *next(iter(lost.items())))

    # ---- calls

    def run(self, call: Call) -> list[Any]:
        """Run a call, or its next request, and return the answers by rank."""
        self._check_open()
        if not self._call_lock.acquire(blocking=False):
            raise RuntimeError("Another thread is calling these workers. Wait until its call ends.")
        before, result = self.record.newest_status, AttemptResult("broken")
        try:
            self._executor.set_call(call)
            with self._aborting_on_error():
                if len(self.members) < self.record.num_required or self._starter.starts_left <= 0:
                    self._starter.reset_failures()  # once per call, to limit the attempts
                result = self._run_attempts()
                if result.error is not None:
                    raise result.error
                self._awaits_load = False
            return [outcome.unpack() for outcome in result.outcomes or ()]
        finally:
            result = AttemptResult("broken")  # an error refers to this frame: this would be a cycle
            try:
                self._executor.set_call(Call())
                if self._awaits_load:  # a load failed: the next call restarts the workers
                    self._awaits_load = False
                    self.record.set_newest_status(before)
                    self._group.discard(*self.members)
            finally:  # also if Ctrl-C ends the wait for a worker's teardown
                self._call_lock.release()

    def can_restart(self) -> bool:
        """Return whether new workers can have the newest state, or that of a kept snapshot.

        This may read a large file.
        """
        if self._policy.keeps_snapshots or self.record.call.replaces_state:
            return True
        step = (self.snapshots.load() or {}).get("global_step", 0)
        return bool(step == self.record.newest_status.position.global_step)

    def stop(self, request: Request) -> None:
        """Interrupt work outside of calls, and send `request` to each idle worker.

        The next call forms a generation.
        """
        if not self.is_shut_down:
            self.check_process()
            self.group_status = "broken"
            self._rpc.interrupt_and_send(request)

    # ---- methods for trainers

    def restart_with_more_workers(self) -> bool:
        """Restart from the snapshot with more workers if they fit. Return whether it did.

        Also restart without preempted workers if enough other workers remain or fit.
        """
        with self._aborting_on_error():
            if self._group.notices.is_ray_silent():
                return False  # no worker could be started
            if num_preempted := len(self._group.preempted()):
                self._group.request_slots()
                num_staying = len(self.members) - num_preempted
                num_vacant = sum(slot.is_ready for slot in self._group.find_vacant_slots())
                if num_staying + num_vacant < self.record.num_required:
                    return False
            elif not self._starter.request_slots():
                return False
            self._restart()
        return True

    def ask_step(self) -> int:
        """Return the newest step of the workers that answer; -1 if none does."""
        statuses = self._rpc.poll_status().values()
        return max((each.position.global_step for each in statuses), default=-1)

    def drain(self, node_id: str | None, rank: int | None, deadline_s: float | None) -> None:
        self._check_open()
        self._preemption.drain(node_id, rank, deadline_s)
