"""The loop that runs calls on all workers and decides what follows when one of them fails.

The states of the group are in `states.py`.
Replacement workers start and set up while the others train (`scaling.py`); when they are ready, the
training call pauses at a step that all agree on, and the next generation includes them.
Decisions are pure functions in `raysgd/elastic/`; what one attempt at a call came to is in
`attempt.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from raysgd.cluster.attempt import Attempt
from raysgd.cluster.call import Call
from raysgd.cluster.drains import Notice
from raysgd.cluster.health import HealthMonitor, Heartbeats, await_stragglers
from raysgd.cluster.host_monitor import HostLostError
from raysgd.cluster.members import Member, cause_of, is_loss
from raysgd.cluster.requests import (
    HeldStateRequest,
    LoadRequest,
    RestartStateRequest,
    TakeHeldRequest,
)
from raysgd.cluster.scaling import Replacement, ScaleUp
from raysgd.cluster.serialization import dumps, sendable
from raysgd.cluster.snapshot import SnapshotKeeper, with_shares
from raysgd.cluster.states import Broken, Closed, Generation, New, Ready, Running, State
from raysgd.cluster.worker import Outcome
from raysgd.cluster.worker_group import WorkerGroup
from raysgd.comm.backend import Backend
from raysgd.context import Preemption, Progress, Request, Runner, WorkerContext
from raysgd.elastic.config import ElasticConfig
from raysgd.elastic.events import Event, EventKind
from raysgd.elastic.policies import (
    assign_contexts,
    backoff_s,
    choose_leader,
    furthest,
    pause_step,
    recovery,
    who_leaves,
)
from raysgd.errors import (
    CollectiveError,
    WorkerLostError,
    WorkerTimeoutError,
)
from raysgd.paths import without_secrets

__all__ = ["Controller"]

logger = logging.getLogger(__name__)

_SHUT_DOWN = "The workers are shut down."
_TOLD = ("lost", "hung", "grown", "restarted", "waiting", "newcomer_failed")
"""Events that have a line of their own in the log."""
_ANSWER_S = 0.7
"""How long a worker may take to answer a control call."""
_SILENCE_S = 10.0
"""After how long a worker that answers no control call counts as lost."""
_STRAGGLER_S = 60.0
"""How long the next call waits for workers that are still busy with one that failed."""
_RESTART_STRAGGLER_S = 5.0
"""The same for training functions: all of their workers restart from a checkpoint anyway."""
_MENTION_S = 30.0
"""After how long to say what a start or a rejoin waits for."""
_SALVAGE_S = 10.0
"""How long a worker may take to hand its state over before all are started anew."""
_MAX_FAILED_REJOINS = 2
"""How often workers that are all alive may fail to make a process group before that is an error."""
_LEAVE_S = 3.0
"""How long leaving takes at most, beside some steps."""
_TICK_S = 1.0
"""How often to look at a call when there is nothing to look for but its end."""
_BUSY_TICK_S = 0.05
"""How often to look at it while replacement workers are on their way."""
_START_TICK_S = 0.01
"""How often to look at workers that come up while there is no group."""
_UNEVEN_TICK_S = 0.25
"""How often to look at it while some workers have returned and others have not."""


class _CutOffError(Exception):
    """Workers that were about to be a group were stopped, since the driver's host was cut off."""


class Controller:
    """Runs calls on all workers of a group, through failures.

    Args:
        group: the workers; not started yet.
        runner: what every worker hosts.
        backend: what the workers communicate through; None with ``num_workers=1``.
        hook: function that each worker calls before anything else.
        timeout_s: bound for setting up and for joining a generation.
        elastic: what to do about losses.
        can_join: whether replacement workers can take the state of others and go on with them, as
            operators do. A training function cannot: the group grows by `grow`, a restart.
    """

    def __init__(
        self,
        group: WorkerGroup,
        runner: Runner,
        backend: Backend | None,
        hook: Callable[[], None] | None,
        timeout_s: float,
        elastic: ElasticConfig | None = None,
        can_join: bool = True,
    ) -> None:
        self.state: State = New()
        self._is_shut_down = False
        self._pid = os.getpid()
        self._group = group
        self._clock = group.clock
        self._backend = backend
        self._timeout_s = timeout_s
        self._elastic = elastic = elastic or ElasticConfig()
        group.watch_hosts(elastic.driver_grace_s, stops_calls=can_join)
        self._recovery = recovery(
            rejoins=backend is None or backend.rejoins,
            in_place=self._elastic.in_place,
            can_join=can_join,
        )
        self._generation = Generation(0)
        self.progress = Progress()
        self._seen_step = 0
        """How far training is, as of the last call or the last new generation."""
        self.events: list[Event] = []
        """What happened to the group, oldest first."""
        self.on_event: Callable[[], None] | None = None
        """Called after each event, in the thread that called."""
        self.on_start: Callable[[], None] | None = None
        """Called whenever all workers have started anew, before they get a snapshot."""
        # the driver's own worker stays, unless all start anew
        start_anew = not self._elastic.in_place and not group.options.inline
        self.snapshots = SnapshotKeeper(of_driver=start_anew)
        self._ranks: dict[Member, int] = {}
        self._entering: list[Member] = []
        self._call = Call()
        """The call under way."""
        self._step_s = 0.0
        """How long a step takes, as last seen."""
        self._told: set[Member] = set()
        """The members that are going, of which it was said."""
        self._announced: tuple[int, Preemption] | None = None
        """What members were told of that, and in which generation."""
        self._must_save = False
        """Whether to save as soon as can be: workers are going, and nobody can take over."""
        # pickled now: what cannot be sent is found before a worker starts
        self._created: tuple[Any, ...] = (hook, runner, backend, sys.path)
        if not group.options.inline:
            self._created = (
                sendable("initialization_hook", hook),
                sendable("the runner", runner),
                sendable("backend", backend),
                sys.path,
            )
        self._scale_up = ScaleUp(
            group,
            self._elastic,
            self._created,
            random.random,
            self._note_failed_replacement,
            timeout_s,
            can_join=can_join,
            rejoins=self._recovery.rejoins,
        )

    # ---- life

    def start(self) -> None:
        """Start the workers and set them up; if that fails, none is left behind."""
        try:
            with self._until_shut_down():
                self._group.reserve(self._group.options.start_timeout_s)
                self._begin(self.min_workers)
                self._record("started", self.members)
        except BaseException:
            self.shutdown(force=True)
            raise

    def shutdown(self, force: bool = False) -> None:
        """End all workers."""
        busy = isinstance(self.state, Running | Broken)
        self._is_shut_down = True
        self.state = Closed()
        self._release(force or busy)

    def _release(self, force: bool) -> None:
        if os.getpid() != self._pid:  # the workers are those of the process that forked this one
            return
        try:
            self._scale_up.stop()
        finally:
            try:
                self._group.shutdown(force)
            finally:
                if self._backend is not None:
                    self._backend.close()

    @contextlib.contextmanager
    def _until_shut_down(self) -> Iterator[None]:
        """Let what is under way end by the error that the workers are shut down, if they are.

        What was started after another thread's `shutdown` is ended.
        """
        try:
            yield
        except Exception as error:
            if not self._is_shut_down or error.args == (_SHUT_DOWN,):
                raise
            raise RuntimeError(_SHUT_DOWN) from error
        finally:
            if self._is_shut_down:
                self._release(force=True)

    def _become(self, state: State) -> None:
        """Take another state; raise if the workers were shut down meanwhile."""
        self._check_open()
        self.state = state
        if self._is_shut_down:  # by another thread, just now
            self.state = Closed()
            raise RuntimeError(_SHUT_DOWN)

    def _broken(self) -> Broken:
        """Take note that the group has to be mended; returns what is known of it."""
        if not isinstance(self.state, Broken):
            self._become(Broken())
        assert isinstance(self.state, Broken)
        return self.state

    def _check_open(self) -> None:
        self.check_process()
        if self._is_shut_down:
            raise RuntimeError(_SHUT_DOWN)

    def check_process(self) -> None:
        """Check that this process is the one that made this, and no fork of it."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                "This process was forked from the one that made the trainer, and has none of its "
                "threads and connections: calls would wait for ever. Call the trainer in that "
                "process, or make one here, in a process that is started by spawn."
            )

    @property
    def members(self) -> list[Member]:
        """The workers, in the order of their ranks."""
        return self._group.members

    @property
    def max_workers(self) -> int:
        """The most workers that the group may have."""
        return self._group.options.num_workers

    @property
    def min_workers(self) -> int:
        """The fewest workers to train with."""
        return self._group.options.min_workers

    # ---- calls

    def run(self, call: Call) -> list[Outcome]:
        """Make a call, or a further part of it, and return the outcomes.

        Raises:
            WorkerLostError: more losses than ``max_losses``, or not enough workers to be had.
            CollectiveError: workers could not communicate though all are alive.
            BaseException: what user code raised first, with the worker's traceback.
        """
        self._check_open()
        if isinstance(self.state, Running):
            raise RuntimeError(
                "Another call on these workers is under way, in another thread; wait for its end."
            )
        min_workers = 1 if call.any_size else self.min_workers
        with self._calling(call):
            call.start_part()
            reached = self.progress  # what all turn out to have taken with them is done again
            redo: Call | None = None
            split = 0
            if len(self.members) < min_workers:
                self._scale_up.try_again()  # once a call: there their number has an end
            while True:
                self._ensure_ready(min_workers)
                if self._must_save and call.can_pause:
                    self._save(call)
                is_behind = self.progress.global_step < reached.global_step
                if is_behind and redo is None and call.catch_up is not None:
                    redo = self._announced_redo(call.catch_up(reached), reached)
                made = redo if is_behind and redo is not None else call
                if not call.has_begun and made is call:
                    call.begin(self.members, furthest([self.progress, reached]))
                members = list(self.members if made.rank is None else [self.members[made.rank]])
                self._seen_step = self.progress.global_step
                attempt = self._attempt(made, members, split)
                if attempt.outcomes:
                    self.progress = furthest([o.progress for o in attempt.outcomes.values()])
                    self._seen_step = self.progress.global_step
                    self._note_drains({m: o.progress for m, o in attempt.outcomes.items()})
                split = self._new_split(call, attempt)
                if attempt.lost:
                    self._handle_losses(attempt.lost)
                elif split:
                    continue
                elif attempt.failed and (
                    attempt.first_error or not (attempt.interrupted_by_us and made.may_repeat)
                ):
                    error = attempt.error()
                    if attempt.first_error is not None:
                        self._record("user_error", [attempt.first_error[0]], cause=repr(error))
                    raise error
                elif not attempt.failed:
                    # workers that were interrupted just as the call ended must enter a generation,
                    # which takes the interruption back
                    self._become(Broken() if attempt.interrupted_by_us else Ready())
                    if not attempt.paused and made is call:
                        self._follow_snapshots({m: attempt.outcomes[m].progress for m in members})
                        return [attempt.outcomes[member] for member in members]

    def _announced_redo(self, redo: Call | None, reached: Progress) -> Call | None:
        """Say that steps are trained again before the call under way, where there is a way."""
        if redo is not None:
            logger.warning(
                "Steps %d to %d were lost with all workers, and are trained again before %s().",
                self.progress.global_step + 1,
                reached.global_step,
                self._call.request.name,
            )
        return redo

    @contextlib.contextmanager
    def _calling(self, call: Call) -> Iterator[None]:
        self._call = call
        try:
            with self._until_shut_down():
                yield
        finally:
            self._call = Call()
            if isinstance(self.state, Running):  # Ctrl-C, just as the attempt had ended
                self._become(Broken())

    def _new_split(self, call: Call, attempt: Attempt) -> int:
        """Return in how many parts to train batches when a call is made again; 0: as they are.

        Memory has run out then, and no other error was the first.
        """
        if attempt.first_error is None or not attempt.first_error[1].split:
            return 0
        member, outcome = attempt.first_error
        call.num_splits += 1
        said = repr(outcome.value())
        self._record("split", [member], cause=said, factor=outcome.split)
        logger.warning(
            "Worker %d ran out of memory after step %d. The step is done again unless its update "
            "was made, and from now on each batch is trained as %d parts that make one update: %s",
            self._ranks[member],
            self.progress.global_step,
            outcome.split,
            without_secrets(said),
        )
        return outcome.split

    def _attempt(self, call: Call, members: Sequence[Member], split: int = 0) -> Attempt:
        """Make one attempt at a call. Returns when all workers have, or shortly after a failure."""
        packed: Any = call.request.with_split(split) if split else call.request
        if not self._group.options.inline:
            what = f"the arguments of {call.request.name}"
            packed = self._group.shared(sendable(what, packed))
        futures: dict[Member, Future[Outcome]] = {}
        attempt = None
        try:
            self._become(Running())
            for member in members:
                futures[member] = member.work("call", packed)
            attempt = Attempt(futures, self._clock)
            hang_timeout_s = self._elastic.hang_timeout_s
            monitor = HealthMonitor(
                attempt, self._ranks, hang_timeout_s, self._clock, call.has_batches
            )
            while attempt.under_way:
                self._check_open()
                busy = call.on_wait is not None or self._scale_up.under_way
                idle_s = _UNEVEN_TICK_S if attempt.outcomes else _TICK_S
                if not attempt.settle(_BUSY_TICK_S if busy else idle_s):
                    self._poll(call, attempt, monitor)
            if attempt.failed:
                self._stop_attempt(attempt)
        except BaseException:
            # Ctrl-C, most likely: stop the work, and let the next call find out how far it got
            if isinstance(self.state, Closed):
                raise
            under_way = futures if attempt is None else attempt.pending
            self._broken().busy |= under_way
            self._interrupt()
            if reached := list(self.ask_progress().values()):
                self.progress = furthest(reached)
            raise
        return attempt

    def _poll(self, call: Call, attempt: Attempt, monitor: HealthMonitor) -> None:
        """Do what there is to do while a call is under way."""
        if self._group.is_cut_off():
            self._give_up_gone(attempt)
            return  # from all workers, which wait as well
        progress = self.ask_progress()
        if call.on_wait is not None:
            call.on_wait(list(progress.values()))
        if progress:
            self._seen_step = max(self._seen_step, *(p.global_step for p in progress.values()))
            self._follow_snapshots(progress)
            self._step_s = max(p.step_s for p in progress.values())
        self._note_drains(progress)
        monitor.mention_uneven()
        stuck = monitor.stuck(progress)
        if stuck is not None:
            self._break_hang(call, attempt, stuck)
        elif (why := monitor.in_vain(progress)) is not None:
            attempt.interrupted_by_us = True
            self._stop_attempt(attempt)
            raise CollectiveError(why)
        self._scale_up.tend(self._generation.number)
        if call.can_pause and self._generation.pause is None:
            joining, leaving = self._who_moves()
            if joining or leaving or self._must_save:
                self._pause(attempt, progress)

    def _give_up_gone(self, attempt: Attempt) -> None:
        """Give up silent workers whose time is over: that they would be silent then was said."""
        now = self._clock.time()
        for member, notice in self._group.leaving().items():
            watch = member.watch
            if notice.leave_by <= now and watch is not None and watch.is_silent:
                why = f"its host {member.info.node_ip} is silent, as was announced: {notice.cause}"
                attempt.give_up(member, HostLostError(why))

    def _follow_snapshots(self, progress: Mapping[Member, Progress]) -> None:
        first, *rest = progress
        are_all = len(progress) == len(self.members)
        others = {member: progress[member] for member in rest} if are_all else None
        self.snapshots.follow(first, progress[first], others)

    def _pause(self, attempt: Attempt, progress: Mapping[Member, Progress]) -> None:
        """Let all workers stop at the same step, for replacement workers to join there."""
        if len(progress) < len(self.members) or attempt.outcomes:
            return  # one is not listening, or the call is ending anyway
        if not all(p.step_s for p in progress.values()):
            return  # how far ahead to stop is known when the first step is done
        step = self._generation.pause = pause_step(list(progress.values()))
        heard = self._let_pause(step)
        in_time = all(f.done() and f.exception() is None and f.result() < step for f in heard)
        if not in_time:
            # some went past the step, and will wait for those that did not; give that step up
            attempt.interrupted_by_us = True
            self._stop_attempt(attempt)

    def _let_pause(self, step: int | None) -> list[Future[int]]:
        """Tell all members at which step to stop, and return their answers as far as they came."""
        answers = [m.control("pause_at", self._generation.number, step) for m in self.members]
        self._clock.wait(answers, _ANSWER_S)
        return answers

    def _break_hang(self, call: Call, attempt: Attempt, stuck: Sequence[Member]) -> None:
        for member in stuck:
            self._record("hung", [member], cause="no batch finished within hang_timeout_s")
            logger.warning("Killing worker %d, which hangs.", self._ranks[member])
            member.kill_process()
        if not stuck:  # they wait for each other: only a new process group can help
            attempt.interrupted_by_us = True
            self._stop_attempt(attempt)
            call.num_hangs += 1
            if call.num_hangs > self._elastic.max_attempts:
                raise CollectiveError(
                    f"No batch finished for {self._elastic.hang_timeout_s:g} s, and no worker "
                    "is stuck by itself: all wait for each other. The log has their stacks."
                )

    def _stop_attempt(self, attempt: Attempt) -> None:
        """Find out why an attempt failed, and stop what is left of it."""
        broken = self._broken()
        attempt.find_cause(self._interrupt)
        broken.busy |= attempt.pending

    def _interrupt(self, besides: Iterable[Member] = ()) -> None:
        """Make the calls under way fail on all members, since each may wait for any other."""
        told = set(besides)
        concerned = [m for m in dict.fromkeys([*self.members, *self._entering]) if m not in told]
        answers = [m.control("interrupt", self._generation.number) for m in concerned]
        self._clock.wait(answers, _ANSWER_S)

    def ask_progress(self) -> dict[Member, Progress]:
        """Return the progress of every worker that answers, while they are busy."""
        asked = {member: member.control("progress") for member in self.members}
        self._clock.wait(asked.values(), _ANSWER_S)
        return {m: f.result() for m, f in asked.items() if f.done() and f.exception() is None}

    def stop(self, request: Request) -> None:
        """Interrupt what goes on in the workers beside calls; the next call makes a new generation.

        Args:
            request: what each idle worker answers when nothing runs there any more.
        """
        if isinstance(self.state, Closed):
            return
        busy = self._broken().busy
        self._interrupt(besides=busy)  # which have been told
        packed = sendable(request.name, request)
        idle = [member for member in self.members if member not in busy]
        attempt = Attempt({member: member.work("call", packed) for member in idle}, self._clock)
        deadline = self._clock.monotonic() + _ANSWER_S
        while attempt.pending and (left := deadline - self._clock.monotonic()) > 0:
            attempt.settle(left)
        busy |= attempt.pending  # one that was lost is found by the next call

    def grow(self) -> bool:
        """Restart with more workers, from what `snapshots` holds, if there is room for them now.

        Or without those that are going to be taken away, if enough are left or have room.

        Returns:
            Whether it did.
        """
        with self._until_shut_down():
            if self._group.drains.is_ray_silent:
                return False  # nobody could be started
            leaving = self._group.leaving()
            if leaving:
                num_staying = len(self.members) - len(leaving)
                num_vacant = sum(slot.is_ready for slot in self._group.vacant_slots())
                if num_staying + num_vacant < self.min_workers:
                    return False
            elif not self._scale_up.has_room():
                return False
            left = "; ".join(f"left {member.name}" for member in leaving)
            self._restart(self.min_workers, len(self.members), left)
        return True

    # ---- workers that are to go

    def drain(self, node_id: str | None, rank: int | None, deadline_s: float | None) -> None:
        """Take note that a node, or a worker, is going to be taken away; in any thread.

        Raises:
            ValueError: if there is no such node or worker, or it is the driver's process.
        """
        self._check_open()
        members = list(self.members)
        if node_id is not None:
            known = {member.node_id for member in members}
            if node_id not in known and node_id not in (known := known | self._group.nodes()):
                there = ", ".join(sorted(known)) or "none"
                raise ValueError(f"drain(node_id={node_id!r}): there is no such node, but {there}.")
            self._group.drains.drain_node(node_id, deadline_s)
            return
        if rank is None or not 0 <= rank < len(members):
            allowed = f"the ranks are 0 to {len(members) - 1}" if members else "no worker is left"
            raise ValueError(f"drain(rank={rank!r}): {allowed}.")
        if not members[rank].remote:
            raise ValueError(
                f"drain(rank={rank}): this worker is the driver's own process (use_local), which "
                "nobody can replace."
            )
        self._group.drains.drain_member(members[rank], deadline_s)

    def _note_drains(self, progress: Mapping[Member, Progress]) -> None:
        """See which members are going, say so, and tell all of them."""
        for member in [member for member, p in progress.items() if p.terminated]:
            self._group.drains.terminate(member)
        leaving = self._group.leaving()
        news = {member: leaving[member] for member in leaving if member not in self._told}
        self._told = set(leaving)
        if news:
            self._say_who_goes(news)
            soon = self._clock.time() + self._leave_s
            is_short = any(notice.leave_by <= soon for notice in news.values())
            too_few = len(self.members) - len(leaving) < max(1, self.min_workers)
            self._must_save = is_short or too_few
        preemption, announced = None, None
        if leaving:
            preemption = self._preemption(leaving)
            announced = (self._generation.number, preemption)
        if announced != self._announced:
            self._announced = announced
            for member in self.members:
                member.control("announce", preemption)

    def _say_who_goes(self, news: Mapping[Member, Notice]) -> None:
        for cause, deadline in dict.fromkeys(notice[:2] for notice in news.values()):
            concerned = [m for m, notice in news.items() if notice[:2] == (cause, deadline)]
            left_s = 0.0 if deadline is None else max(0.0, deadline - self._clock.time())
            self._record("draining", concerned, cause=cause, seconds=left_s)
            logger.warning(
                "Workers are going to be taken away%s (%s): %s.",
                "" if deadline is None else f" within {left_s:.0f} s",
                cause,
                ", ".join(f"worker {self._ranks[m]} on {m.name}" for m in concerned),
            )

    def _preemption(self, leaving: Mapping[Member, Notice]) -> Preemption:
        ranks: dict[str, list[int]] = {}
        for member in leaving:
            ranks.setdefault(member.node_id, []).append(self._ranks[member])
        deadlines = [each.deadline for each in leaving.values() if each.deadline is not None]
        return Preemption(deadline=min(deadlines, default=None), ranks_by_node=ranks)

    @property
    def _leave_s(self) -> float:
        """How long before its time a worker leaves that nobody succeeds."""
        return _LEAVE_S + 4 * self._step_s

    def _who_moves(self) -> tuple[list[Replacement], list[Member]]:
        """Return the replacement workers that join at the next step, and the members that leave."""
        ready, leaving = self._scale_up.ready(), self._group.leaving()
        gone: list[Member] = []
        if leaving and self._recovery.replaces:
            now = self._clock.time()
            ranks = who_leaves(
                {self._ranks[member]: n.leave_by - now for member, n in leaving.items()},
                num_workers=len(self.members),
                num_ready=len(ready),
                min_workers=self.min_workers,
                margin_s=self._leave_s,
            )
            gone = [member for member in leaving if self._ranks[member] in ranks]
        return ready[: self.max_workers - len(self.members) + len(gone)], gone

    def _save(self, call: Call) -> None:
        """Take a snapshot, and let callbacks save at the next step."""
        self._must_save = False
        self._rescue_state()
        call.at_once, call.has_begun = True, False

    def _farewell(self, members: Sequence[Member]) -> None:
        """Ask workers that are about to end for what they have measured in the call under way."""
        call = self._call
        if call.farewell is None or not members:
            return
        packed = dumps(call.farewell)
        asked = [member.work("call", packed) for member in members]
        self._clock.wait(asked, _ANSWER_S)
        given = [f.result() for f in asked if _error_of(f) is None]
        call.num_missing += len(asked) - len(given)
        call.departed_results += [outcome for outcome in given if _value_of(outcome) is not None]

    # ---- generations

    def _ensure_ready(self, min_workers: int) -> None:
        """Mend a group that is broken, let replacement workers in, and wait for enough workers."""
        while True:
            self._check_open()
            self._note_drains({})
            self._scale_up.tend(self._generation.number)
            joining, leaving = self._who_moves()
            if not self.members:
                self._restart(min_workers)
            elif len(self.members) + len(joining) < min_workers:
                self._await_workers(min_workers)
            elif isinstance(self.state, Broken) or joining or leaving:
                if self._recovery.rejoins and len(leaving) < len(self.members):
                    self._make_generation()
                else:
                    self._replace_all(min_workers, leaving)
            else:
                break
        if self._generation.pause is not None:  # nobody joined, so that nobody was told to go on
            self._let_pause(None)
            self._generation.pause = None

    def _make_generation(self) -> None:
        """Make a new generation of the survivors and the replacement workers that are ready."""
        started = self._clock.monotonic()
        lost = self._await_stragglers()
        if lost:
            self._handle_losses(lost)
            return
        before = list(self.members)
        replacements, leaving = self._who_moves()
        lost = self._rejoin(replacements, leaving)
        if lost:
            self._handle_losses(lost)
        if not isinstance(self.state, Ready):
            return
        seconds = self._clock.monotonic() - started
        left = self._let_go([member for member in before if member not in self.members])
        joined = [r for r in replacements if r.member in self.members]
        if joined:
            self._scale_up.joined(joined)
            joining = [r.member for r in joined if r.member is not None]
            self._record("moved" if left else "grown", joining, cause=left, seconds=seconds)
            who = f"Worker{'s' * (len(joining) > 1)} {self._listed(joining)}"
            logger.info(
                "%s joined: going on with %d of %d.", who, len(self.members), self.max_workers
            )
        else:
            self._record("resumed", self.members, cause=left, seconds=seconds)
            if left:
                logger.warning("Going on with %d of %d.", len(self.members), self.max_workers)

    def _let_go(self, members: Sequence[Member]) -> str:
        """Let members end that have left the group, and say which these are."""
        self._farewell(members)
        for member in members:
            self._group.discard(member)
        return "; ".join(f"a worker has left {member.name}" for member in members)

    def _await_stragglers(self) -> dict[Member, BaseException]:
        """Wait for workers that did not return in time; those that still do not are lost."""
        patience_s = _STRAGGLER_S if self._recovery.replaces else _RESTART_STRAGGLER_S
        return await_stragglers(self._broken().busy, self._ranks, self._clock, patience_s)

    def _rejoin(
        self, replacements: Sequence[Replacement], leaving: Sequence[Member]
    ) -> dict[Member, BaseException]:
        """Let members and replacements enter a new generation; returns members that were lost.

        The group is `Ready` and includes the replacement workers, and not the members that are
        leaving, if all went well; else `Broken`.
        """
        joining = {r.member: r for r in replacements if r.member is not None}
        answers, lost = self._reached([*self.members, *joining])
        for member in [member for member in joining if member in lost]:
            self._scale_up.fail(joining.pop(member), lost.pop(member))
        if lost:
            return lost
        leader = self.members[choose_leader([answers[member] for member in self.members])]
        if answers[leader].partial and self.snapshots.state() is not None:
            self._give_up_state(
                joining.values(), "an optimizer raised within a step on each of them"
            )
            return {}
        staying = [member for member in self.members if member not in leaving]
        if leader in leaving:
            first = staying[choose_leader([answers[member] for member in staying])]
            is_behind = answers[first].global_step < answers[leader].global_step
            if is_behind or answers[first].partial:
                staying, joining = self.members, {}  # only one that leaves has the newest state
            else:
                leader = first
        self.progress = answers[leader]
        # the step is done, though not all can tell what they measured in it
        newest = self.progress.global_step
        self._call.num_missing += sum(answers[m].global_step < newest for m in self.members)
        broken = self._broken()
        if self.progress.divided:
            self._hand_over([m for m in self.members if m not in staying], staying[0])
        entering = self._group.in_order([*staying, *joining])
        attempt = self._enter(entering, self._contexts(entering), leader)
        if any(outcome.progress.lacks_state for outcome in attempt.outcomes.values()):
            self._give_up_state(
                joining.values(),
                "shares of the optimizers' state are lost with all the workers that held them",
            )
            return {}
        if not attempt.failed:
            self._group.members[:] = entering
            self._number(self.members)
            start_step = self._call.metrics_start_step
            start_step |= dict.fromkeys(joining, self.progress.global_step)
            self._become(Ready())
            return {}
        # a replacement that was lost is given up; the others join the next time, unless one of them
        # may be the reason of a failure that is no loss
        reason = None if attempt.lost else attempt.error()
        for member, replacement in joining.items():
            if (error := attempt.lost.pop(member, reason)) is not None:
                broken.busy.pop(member, None)  # it is no member that could be lost
                self._scale_up.fail(replacement, error)
        if reason is not None and not joining:
            broken.num_failed_rejoins += 1
            if (
                not isinstance(reason, CollectiveError)
                or broken.num_failed_rejoins > _MAX_FAILED_REJOINS
            ):
                raise reason
            logger.warning("No new process group came about, and is tried again: %s", reason)
        return attempt.lost

    def _hand_over(self, leaving: Sequence[Member], to: Member) -> None:
        """Let a member hold what others hold of a divided state that are about to leave."""
        for held in self._asked(leaving, HeldStateRequest()):
            self._asked([to], TakeHeldRequest(held=held))

    def _give_up_state(self, joining: Iterable[Replacement], why: str) -> None:
        """End all workers, because none has the state of the last step."""
        for replacement in joining:
            self._scale_up.drop(replacement)
        if self._elastic.snapshot_every is None:
            raise self._failed(f"{why}, and there is no snapshot_every to go back to")
        logger.warning("All workers restart from the snapshot: %s.", why)
        self._discard_members()

    def _reached(
        self, members: Iterable[Member]
    ) -> tuple[dict[Member, Progress], dict[Member, BaseException]]:
        """Return how far workers are, and who is lost: those that do not answer are ended."""
        asked = {member: member.control("progress") for member in members}
        deadline = self._clock.monotonic() + _SILENCE_S
        while True:
            self._clock.wait(asked.values(), _TICK_S)
            if self._group.is_cut_off():
                deadline = self._clock.monotonic() + _SILENCE_S
            # answers are lost with Ray's connection to a worker, after 20 s without a link
            again = [m for m, f in asked.items() if (e := _error_of(f)) and m.may_live(e)]
            is_done = not again and all(f.done() for f in asked.values())
            if is_done or self._clock.monotonic() >= deadline:
                break
            if again:
                self._clock.sleep(_BUSY_TICK_S)
            asked |= {member: member.control("progress") for member in again}
            self._check_open()
        lost = {member: error for member, f in asked.items() if (error := _error_of(f))}
        for member, error in lost.items():
            if not is_loss(error):  # it may be stopped
                member.kill_process()
        return {m: f.result() for m, f in asked.items() if m not in lost}, lost

    def _handle_losses(self, lost: Mapping[Member, BaseException]) -> None:
        """Take lost workers out of the group; raise where the call cannot go on."""
        call = self._call
        broken = self._broken()
        for member in lost:
            broken.busy.pop(member, None)
        # replacement workers that were joining cost no retry
        lost = {m: e for m, e in lost.items() if not self._scale_up.fail_member(m, e)}
        if not lost:
            return
        for member, error in lost.items():
            rank, said = self._ranks.get(member, -1), cause_of(member, error)
            since = call.metrics_start_step.get(member, self.progress.global_step)
            # no survivor to ask: use the last polled progress
            step = max(self.progress.global_step, self._seen_step)
            self._record("lost", [member], cause=said, num_batches=max(0, step - since), step=step)
            call.causes.append(f"worker {rank} on {member.name}: {said}")
            logger.warning("Lost worker %d on %s: %s", rank, member.name, said)
            is_doubted = isinstance(error, HostLostError)
            self._scale_up.lost(self._group.slot_of(member), is_doubted)
            self._group.discard(member)
        if not self._recovery.survivors_stay:
            if self._recovery.rescues_state:
                self._rescue_state()
            self._discard_members()
        self._scale_up.resized()
        self._scale_up.tend(self._generation.number)
        member, error = next(iter(lost.items()))
        if call.has_begun:
            call.num_losses += 1
            if call.num_losses > call.max_losses:
                raise self._failed(
                    f"{call.num_losses} loss{'es' * (call.num_losses > 1)} in one call, "
                    f"which allows {call.max_losses} (max_retries, in train and fit)",
                    member,
                    error,
                )
        else:  # what was lost since the last call costs this one no retry
            call.num_losses_before += 1
            if call.num_losses_before > self._elastic.max_attempts:
                raise self._failed("workers are lost again and again", member, error)
        if self.members:
            logger.warning("Going on with %d of %d workers.", len(self.members), self.max_workers)
        else:
            logger.warning("Starting all workers anew.")

    def _failed(
        self, why: str, member: Member | None = None, cause: BaseException | None = None
    ) -> WorkerLostError:
        error = WorkerLostError(
            "\n".join([f"Training run failed: {why.rstrip('.')}.", *self._call.causes]),
            rank=-1 if member is None else self._ranks.get(member, -1),
            node_id="" if member is None else member.info.node_id,
            cause="" if cause is None else cause_of(member, cause),
        )
        error.__cause__ = cause
        return error

    # ---- too few workers

    def _await_workers(self, min_workers: int) -> None:
        """Wait until there are enough workers; for room that is not there, longer each time."""
        config, starting = self._elastic, not self.members
        missing = f"{len(self.members)} left, and min_workers={min_workers}"
        if not starting and (not config.grow or self._group.options.inline):
            raise self._failed(f"{missing}, and replacement workers are not allowed (grow=False)")
        deadline, number = 0.0, 0
        while True:
            self._check_open()
            self._scale_up.tend(self._generation.number, starting)
            if starting and (error := self._scale_up.error) is not None:
                lost = isinstance(error, WorkerLostError) and self._call.causes
                raise self._failed(str(error), cause=error) if lost else error
            if self._scale_up.are_enough(min_workers):
                return
            now = self._clock.monotonic()
            is_short = len(self.members) + self._scale_up.coming() < min_workers
            if is_short and now >= deadline and not self._group.drains.is_ray_silent:
                if number == config.max_attempts:
                    raise self._failed(f"{missing}, and no room for more: {self._group.room()}")
                wait_s = backoff_s(number, config, random.random())
                self._mention_wait(missing, number, wait_s)
                deadline, number = now + wait_s, number + 1
            self._clock.sleep(_START_TICK_S if starting else _BUSY_TICK_S)

    # ---- a group begins

    def _begin(self, min_workers: int) -> None:
        """Bring workers up until they are a group, with the newest snapshot's state.

        Whoever is lost on the way is replaced, and the others stay.
        """
        self._scale_up.begin()
        while not self.members:
            self._await_workers(min_workers)
            ready = self._scale_up.ready()
            joining = {r.member: r for r in ready if r.member is not None}
            _, lost = self._reached(joining)
            for member, error in lost.items():  # while they waited
                self._scale_up.fail(joining[member], error)
            if lost:
                continue
            try:
                self._found(joining)
            except (WorkerLostError, _CutOffError) as failure:
                self._part(joining, failure)
            else:
                self._scale_up.joined(ready)
            self._scale_up.set_up_alone(self._generation.number)
        if not (self._recovery.joins and self._elastic.grow):
            self._scale_up.stop()  # those that are late would never be let in
        self._become(Ready())

    def _found(self, joining: Mapping[Member, Replacement]) -> None:
        """Let workers that are ready be the group.

        Raises:
            WorkerLostError: if one of them is lost meanwhile.
            _CutOffError: if they did not reach the driver for a while.
        """
        members = self._group.in_order(sorted(joining, key=lambda member: member.remote))
        contexts = self._contexts(members)
        self._number(members)
        leader = None
        if self._scale_up.together:
            for member, context in zip(members, contexts, strict=True):
                joining[member].context, joining[member].step = context, "set up"
            prepared = self._step("prepare", [(c,) for c in contexts], "get ready", members)
            self._raise_failure(prepared)
        else:
            leader = members[0]
            self._load_snapshot([leader])  # which the others get from it
        self._raise_failure(self._enter(members, contexts, leader))
        self._group.members[:] = members
        if self.on_start is not None:
            self.on_start()
        if leader is None:
            self._load_snapshot(members)

    def _part(self, joining: Mapping[Member, Replacement], error: Exception) -> None:
        """Give up who was lost as a group was to begin; the others stay where they can."""
        # nobody knows what `on_start` has done to a process, and some can be in one group only
        are_used = bool(self.members) or not self._recovery.rejoins
        self.members.clear()
        _, lost = self._reached(joining)
        if not lost and not isinstance(error, _CutOffError):
            raise error
        busy = self._broken().busy
        for member, replacement in joining.items():
            busy.pop(member, None)  # it is no member that could be lost
            if member in lost:
                self._scale_up.fail(replacement, lost[member])
            elif are_used:
                self._scale_up.drop(replacement)
        # a late interruption of this generation is not to reach what they do alone
        self._generation = Generation(self._generation.number + 1)

    def _load_snapshot(self, members: Sequence[Member]) -> None:
        """Let workers take over the newest snapshot; without one they stay as their setup was."""
        state = self.snapshots.state()
        self.progress = Progress()
        if state is None:
            return
        packed = self._group.shared(
            sendable("the snapshot", LoadRequest(state=dict(state))), members
        )
        attempt = self._step("call", [(packed,)] * len(members), "load", members)
        self._raise_failure(attempt)
        self.progress = next(iter(attempt.outcomes.values())).progress

    # ---- all start anew

    def _replace_all(self, min_workers: int, leaving: Sequence[Member]) -> None:
        """Start all workers anew with the state that they have."""
        num_before = len(self.members)
        if leaving:
            self._farewell(self.members)
        if leaving or self._recovery.rescues_state:
            self._rescue_state()
        self._restart(min_workers, num_before, "; ".join(f"left {m.name}" for m in leaving))

    def _rescue_state(self) -> None:
        """Take over the state of the workers that are left."""
        reached = self.ask_progress()
        remote = [member for member in reached if member.remote]
        each = [[m] for m in sorted(remote, key=lambda m: -reached[m].global_step)]
        is_divided = any(p.divided for p in reached.values())
        for members in [list(reached)] if is_divided else each:
            states = self._asked(members, RestartStateRequest(num_workers=len(members)))
            if not states or len({state.get("global_step") for state in states}) > 1:
                continue
            self.snapshots.set(with_shares(states), reached[members[0]].global_step)
            if isinstance(self.state, Broken):
                self.state.has_state = True
            self.progress = reached[members[0]]
            return

    def _asked(self, members: Sequence[Member], request: Request) -> list[Any]:
        """Return what members answer; nothing where one of them does not, or has nothing."""
        packed = dumps(request)
        asked = [member.work("call", packed) for member in members]
        self._clock.wait(asked, _SALVAGE_S)
        given = [_value_of(f.result()) for f in asked if _error_of(f) is None]
        return given if len(given) == len(members) and None not in given else []

    def _restart(self, min_workers: int, num_before: int | None = None, left: str = "") -> None:
        """Let all members end, and workers that come up go on from the newest snapshot."""
        config = self._elastic
        started = self._clock.monotonic()
        has_state = self._broken().has_state or bool(left)
        if config.snapshot_every is None and self.progress.global_step > 0 and not has_state:
            raise self._failed("all workers are lost, and there is no snapshot_every to go back to")
        self._call.metrics_start_step = {}
        self._discard_members()
        if not self._recovery.joins:
            self._scale_up.stop()  # these only waited for room
        try:
            self._begin(min_workers)
        except BaseException:
            self._discard_members()
            self._scale_up.stop()
            if not self._is_shut_down:
                self._broken().has_state = has_state
            raise
        if self._call.has_begun:  # what was measured in the call is gone
            since = dict.fromkeys(self.members, self.progress.global_step)
            self._call.metrics_start_step = since
        grown = num_before is not None and len(self.members) > num_before
        joining = self.members[num_before:] if grown else self.members
        seconds = self._clock.monotonic() - started
        kind: EventKind = "grown" if grown else "restarted"
        if left and len(self.members) >= (num_before or 0):
            kind = "moved"
        self._record(kind, joining, cause=left, seconds=seconds)
        logger.info(
            "Restarted %d workers from step %d.", len(self.members), self.progress.global_step
        )

    def _discard_members(self) -> None:
        for member in list(self.members):
            self._group.discard(member)

    def _mention_wait(self, why: str, number: int, wait_s: float) -> None:
        self._record("waiting", [], cause=why, seconds=wait_s)
        logger.warning(
            "Too few workers (%s). Try %d of %d, for %.1f s: %s",
            why,
            number + 1,
            self._elastic.max_attempts,
            wait_s,
            self._group.room(),
        )

    def _note_failed_replacement(self, member: Member | None, error: BaseException) -> None:
        said = cause_of(member, error)
        self._record("newcomer_failed", [] if member is None else [member], cause=said)
        logger.warning("A replacement worker failed before it joined: %s", said)

    # ---- helpers

    def _record(
        self,
        kind: EventKind,
        members: Sequence[Member],
        *,
        cause: str = "",
        seconds: float = 0.0,
        num_batches: int = 0,
        factor: int = 1,
        step: int | None = None,
    ) -> None:
        event = Event(
            kind=kind,
            generation=self._generation.number,
            ranks=tuple(self._ranks.get(member, -1) for member in members),
            nodes=tuple(member.node_id for member in members),
            step=self.progress.global_step if step is None else step,
            cause=without_secrets(cause),  # which goes into files, and to servers
            seconds=seconds,
            num_batches=num_batches,
            factor=factor,
            num_workers=self._num_left() if kind == "lost" else len(self.members),
        )
        self.events.append(event)
        if kind not in _TOLD:
            # a state may be loaded yet
            at = "" if kind == "started" else f", step {event.step}"
            took = f", {seconds:.2f} s" if seconds else ""
            logger.info(
                "%s: workers %s, generation %d%s%s.%s",
                kind.capitalize(),
                self._listed(members) or "none",
                event.generation,
                at,
                took,
                f" {event.cause}" if event.cause else "",
            )
        if self.on_event is not None:
            self.on_event()

    def _num_left(self) -> int:
        """Return how many workers will be left when one that is lost, and still here, is gone."""
        return len(self.members) - 1 if self._recovery.survivors_stay else 0

    def _contexts(self, members: Sequence[Member]) -> list[WorkerContext]:
        self._generation = Generation(self._generation.number + 1)
        return assign_contexts(
            [member.info for member in members],
            generation=self._generation.number,
            distributed=self._backend is not None,
            num_cpus=self._group.options.num_cpus,
        )

    def _enter(
        self,
        entering: Sequence[Member],
        contexts: Sequence[WorkerContext],
        leader: Member | None,
    ) -> Attempt:
        """Let workers enter a generation, with the state of `leader` or by their setup."""
        rendezvous, leader_rank = None, None
        if self._backend is not None:
            rendezvous = self._backend.prepare([m.info.node_ip for m in entering])
        if leader is not None:
            leader_rank = list(entering).index(leader)
        arguments = [(context, rendezvous, leader_rank) for context in contexts]
        what = "set up" if leader is None else "join a new generation"
        listening = leader is not None
        attempt = self._step("enter", arguments, what, entering, listening)
        if self._backend is not None and not attempt.failed:
            self._backend.met()
        return attempt

    def _step(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]],
        what: str,
        members: Sequence[Member],
        listening: bool = False,
    ) -> Attempt:
        """Let workers take one step of a start or a rejoin, within the bound for those.

        With `listening`, a worker that answers no control call counts as lost.
        """
        self._entering = list(members)
        attempt = Attempt(
            {m: m.work(method, *a) for m, a in zip(self._entering, arguments, strict=True)},
            self._clock,
        )
        deadline = self._clock.monotonic() + self._timeout_s
        mentioned = self._clock.monotonic()
        heartbeats = Heartbeats(_SILENCE_S)
        while attempt.under_way:
            attempt.settle(1.0)
            self._check_open()
            now = self._clock.monotonic()
            if self._group.is_cut_off():  # all workers are silent
                heartbeats = Heartbeats(_SILENCE_S)
                continue
            for member in heartbeats.silent(attempt.pending, now) if listening else ():
                member.kill_process()
                attempt.give_up(member, _silence())
            if now > deadline:
                waiting = self._listed(attempt.pending)
                if self._backend is not None:
                    self._backend.close()  # wakes those that still look for each other
                self._stop_attempt(attempt)
                raise WorkerTimeoutError(
                    f"Waited {self._timeout_s:g} s (timeout_s) for the workers to {what}, in vain "
                    f"for {waiting}.",
                    waited_s=self._timeout_s,
                )
            if now - mentioned > _MENTION_S:
                logger.warning(
                    "Still waiting for workers %s to %s.", self._listed(attempt.pending), what
                )
                mentioned = now
        if attempt.failed:
            if self._backend is not None:
                self._backend.close()  # wakes those that still look for each other
            self._stop_attempt(attempt)
        self._entering = []
        return attempt

    def _raise_failure(self, attempt: Attempt) -> None:
        for member, error in attempt.lost.items():
            raise WorkerLostError(
                f"Lost worker {self._ranks[member]} on {member.name} while the workers were "
                f"starting: {cause_of(member, error)}",
                rank=self._ranks[member],
                node_id=member.info.node_id,
            ) from error
        if attempt.failed:
            is_cut_off = attempt.interrupted_by_us and attempt.first_error is None
            raise _CutOffError if is_cut_off else attempt.error()

    def _number(self, members: Sequence[Member]) -> None:
        self._ranks = {member: rank for rank, member in enumerate(members)}

    def _listed(self, members: Iterable[Member]) -> str:
        names = [str(self._ranks.get(member, "(new)")) for member in members]
        return ", ".join(sorted(names))


def _error_of(answer: Future[Any]) -> BaseException | None:
    """Return why a control call failed, which may be silence."""
    return answer.exception() if answer.done() else _silence()


def _value_of(outcome: Outcome) -> Any:
    return outcome.value() if outcome.kind == "ok" else None


def _silence() -> WorkerTimeoutError:
    return WorkerTimeoutError(f"no answer within {_SILENCE_S:g} s")
