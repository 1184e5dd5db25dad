"""Runs calls on all workers of a group, through failures.

`state_machine.py` decides what follows from an event. The controller executes the actions, and
their result is the next event. Workers only answer: `WorkerStarter` and `GroupFormer` call
`create_runner`, `set_up`, and `rejoin` of a `Worker`, `Supervisor` sends each attempt at a call to
`handle`, and `GroupRpc` sends other requests, and control messages such as `interrupt`.
"""

from __future__ import annotations

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
from raysgd.cluster.worker import Outcome
from raysgd.cluster.worker_handle import cause_of
from raysgd.comm.backend import CollectiveBackend
from raysgd.elastic import state_machine
from raysgd.elastic.call import Call
from raysgd.elastic.config import ElasticConfig
from raysgd.elastic.group_former import GroupFormer
from raysgd.elastic.group_record import GroupRecord
from raysgd.elastic.group_rpc import GroupRpc
from raysgd.elastic.policies import Policy
from raysgd.elastic.preemption import PreemptionMonitor
from raysgd.elastic.share_balancer import ShareBalancer
from raysgd.elastic.snapshots import SnapshotKeeper
from raysgd.elastic.speed import SpeedMonitor
from raysgd.elastic.state_machine import Action, CallFailed, FormingFailed, GroupEvent, GroupState
from raysgd.elastic.supervisor import Supervisor
from raysgd.elastic.worker_starter import WorkerStarter

logger = logging.getLogger(__name__)

_SHUT_DOWN = "The workers are shut down."


class Controller:
    """Executes the actions of the state machine.

    `backend` is None with one worker. Each worker calls `hook` first. `timeout_s` limits the setup
    and the joining of a generation. With `supports_live_join`, replacement workers can join during
    a call, as with operators. Otherwise workers are added only by a restart: in `grow`, or after a
    loss. `on_start` is called after all workers have started, before they load a snapshot.
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
        self.state: GroupState = state_machine.Broken()
        self.is_shut_down = False
        self._call_lock = threading.Lock()
        self._pid = os.getpid()
        self._group, self.members = group, group.members
        self.min_workers = group.options.min_workers
        elastic = elastic or ElasticConfig()
        group.watch_hosts(elastic.driver_grace_s, interrupts_calls=supports_live_join)
        self.policy = policy = Policy(
            process_can_rejoin=backend is None or backend.process_can_rejoin,
            supports_live_join=supports_live_join,
            max_early_failures=elastic.max_attempts,
            may_grow=elastic.grow and not group.options.is_inline,
            keeps_snapshots=elastic.snapshot_every is not None,
        )
        # Pickle here, so that an error is raised before a worker starts.
        created: dict[str, Any]
        created = {"initialization_hook": hook, "the runner": runner, "backend": backend}
        if not group.options.is_inline:
            created = {name: pack_as(name, value) for name, value in created.items()}
        arguments = (*created.values(), sys.path)
        self.record = record = GroupRecord(group, policy.survivors_stay)
        self.events, self._backend = record.events, backend
        self.snapshots, self.speed = snapshots, speed = SnapshotKeeper(group), SpeedMonitor(group)
        self._rpc = rpc = GroupRpc(group, record, self._check_open, timeout_s)
        self._preemption = preemption = PreemptionMonitor(group, record, supports_live_join)
        self._starter = starter = WorkerStarter(
            record, elastic, policy, preemption, arguments, timeout_s
        )
        shares = ShareBalancer(group, record, elastic)
        self._former = GroupFormer(rpc, starter, snapshots, shares, backend, on_start)
        self._supervisor = Supervisor(rpc, starter, snapshots, shares, speed)
        self._awaits_load = False
        """Whether the workers have the state of their setup, because a load follows."""

    # ---- lifecycle

    def start(self) -> None:
        """Start the workers and set them up. If that fails, stop them."""
        try:
            with self._aborting_on_error():
                self._group.reserve()
                self._react(state_machine.StartRequested(min_workers=self.min_workers))
        except BaseException:
            self.shutdown(force=True)
            raise

    def shutdown(self, force: bool = False) -> None:
        self.is_shut_down = True
        self._release(force or not isinstance(self.state, state_machine.Ready))

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
                has_reached = self._supervisor.execution.attempt is not None
                self._react(state_machine.Aborted(reached_workers=has_reached))
                if has_reached and isinstance(error, KeyboardInterrupt):
                    self.record.interruption = "interrupted by Ctrl-C"
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

    # ---- event loop

    def _react(self, event: GroupEvent) -> GroupEvent:
        """Execute the actions that follow from an event, and return the last event."""
        while True:
            self._check_open()
            self.state, actions = state_machine.transition(self.state, event, self.policy)
            following = None
            for action in actions:
                assert following is None  # only the last action returns an event
                if action in (Action.RUN_CALL, Action.REPLAY):  # here: short tracebacks of users
                    following = self._supervisor.run_attempt(is_replay=action is Action.REPLAY)
                else:
                    following = self._execute(action)
            if following is None:
                return event
            event = following

    def _execute(self, action: state_machine.GroupAction) -> GroupEvent | None:
        former, record, call = self._former, self.record, self.record.call
        match action:
            case Action.CHECK_GROUP:
                return self._supervisor.check_group()
            case Action.AWAIT_WORKERS:
                former.await_workers(self.state.budget.min_workers)
            case Action.REJOIN:
                return former.rejoin()
            case Action.RESTART:
                self._awaits_load, before = call.replaces_state, record.progress
                try:
                    return former.restart(self.state.budget.min_workers)
                except BaseException:  # the next call restarts again, and repeats the lost steps
                    record.set_progress(before)
                    raise
            case Action.RESCUE_STATE:
                record.set_progress(self.snapshots.rescue(self._rpc))
            case Action.CHECK_SNAPSHOT:
                return state_machine.SnapshotChecked(can_restart=self.can_restart())
            case Action.INTERRUPT:
                assert self._supervisor.execution.attempt is not None
                self._rpc.interrupt(self._supervisor.execution.attempt)
                record.set_progress(*self._rpc.ask_progress().values())
            case Action.COLLECT_METRICS:
                former.collect_metrics(self.members)
            case state_machine.RemoveLost(lost):
                for member, error in lost.items():
                    record.add_event("lost", [member], cause=cause_of(member, error))
                    self._starter.expect_replacement(member)
                    self._group.discard(member)
                call.num_failures = self.state.budget.num_failures
            case state_machine.DiscardWorkers(why):
                if why:
                    text = "All workers restart from the snapshot, or from setup() without one: %s."
                    logger.warning(text, why)
                self._starter.discard_pending()
                self._group.discard(*self.members)
            case state_machine.Fail(why, lost):
                if lost:
                    self._starter.advance_if_allowed()
                if not self.members:  # a restart in this call may have begun before it
                    record.set_progress(record.progress, self._supervisor.execution.progress_before)
                first_lost, reason = next(iter(lost.items()), (None, None))
                raise record.make_error(why, first_lost, reason)
        return None

    # ---- calls

    def run(self, call: Call) -> list[Outcome]:
        """Run a call, or its next request, and return the outcomes."""
        self._check_open()
        min_workers = 1 if call.allows_any_size else self.min_workers
        budget = state_machine.CallBudget(
            in_call=True,
            min_workers=min_workers,
            max_failures=call.max_failures,
            num_failures=call.num_failures,
            replaces_state=call.replaces_state,
        )
        if not self._call_lock.acquire(blocking=False):
            raise RuntimeError("Another thread is calling these workers. Wait until its call ends.")
        before, end = self.record.progress, None
        try:
            self._supervisor.set_call(call)
            with self._aborting_on_error():
                has_attempts = len(self._starter.failures) < self._starter.config.max_attempts
                if len(self.members) < min_workers or not has_attempts:
                    self._starter.reset_failures()  # once per call, to limit the attempts
                end = self._react(state_machine.CallRequested(budget=budget))
                if isinstance(end, CallFailed | FormingFailed) and end.error:
                    raise end.error
                assert isinstance(end, state_machine.CallReturned)
                self._awaits_load = False
                return list(end.outcomes)
        finally:
            end = None  # an error refers to this frame, which would be a cycle
            try:
                self._supervisor.set_call(Call())
                if self._awaits_load:  # a load failed: the next call restarts the workers
                    self._awaits_load = False
                    self.record.set_progress(before)
                    self._group.discard(*self.members)
            finally:  # also if Ctrl-C ends the wait for a worker's teardown
                self._call_lock.release()

    def can_restart(self) -> bool:
        """Return whether new workers can have the newest state, or that of a kept snapshot.

        This may read a large file.
        """
        if self.policy.keeps_snapshots or self.record.call.replaces_state:
            return True
        step = (self.snapshots.load() or {}).get("global_step", 0)
        return bool(step == self.record.position.global_step)

    def stop(self, request: Request) -> None:
        """Interrupt work outside of calls, and send `request` to each idle worker.

        The next call forms a generation.
        """
        if not self.is_shut_down:
            self._react(state_machine.StopRequested())
            self._rpc.interrupt_and_send(request)

    # ---- methods for trainers

    def grow(self) -> bool:
        """Restart from the snapshot with more workers if they fit. Return whether it did.

        Also restart without preempted workers if enough other workers remain or fit.
        """
        with self._aborting_on_error():
            if self._group.notices.detect_ray_silence():
                return False  # no worker could be started
            if num_preempted := len(self._group.preempted()):
                num_staying = len(self.members) - num_preempted
                num_vacant = sum(slot.is_ready for slot in self._group.find_vacant_slots())
                if num_staying + num_vacant < self.min_workers:
                    return False
            elif not self._starter.request_slots():
                return False
            self._react(state_machine.StartRequested(min_workers=self.min_workers))
        return True

    def ask_step(self) -> int:
        """Return the newest step of the workers that answer; -1 if none does."""
        answers = self._rpc.ask_progress().values()
        return max((each.position.global_step for each in answers), default=-1)

    def drain(self, node_id: str | None, rank: int | None, deadline_s: float | None) -> None:
        self._check_open()
        self._preemption.drain(node_id, rank, deadline_s)
