"""Runs calls on all workers of a group, through failures.

`raysgd/elastic/machine.py` decides, by a pure function, what follows from an event. The controller
executes the actions, and what happens is the next event. Features of the driver, such as
preemption or snapshots, observe the group through the interface of `feature.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from raysgd.cluster.attempt import Attempt
from raysgd.cluster.call import Call
from raysgd.cluster.commands import Commands
from raysgd.cluster.feature import Feature
from raysgd.cluster.forming import GroupForming
from raysgd.cluster.health import HealthMonitor
from raysgd.cluster.journal import Journal
from raysgd.cluster.members import Member, cause_of
from raysgd.cluster.pauses import Pauses
from raysgd.cluster.preemption import PreemptionWatch
from raysgd.cluster.scaling import Replacement, ScaleUp
from raysgd.cluster.serialization import sendable
from raysgd.cluster.snapshot import SnapshotKeeper
from raysgd.cluster.worker import Outcome
from raysgd.cluster.worker_group import WorkerGroup
from raysgd.comm.backend import Backend
from raysgd.context import Progress, Request, Runner
from raysgd.elastic import machine
from raysgd.elastic.config import ElasticConfig
from raysgd.elastic.events import Event, EventKind
from raysgd.elastic.machine import Do, State, transition
from raysgd.elastic.policies import backoff_s, furthest, recovery
from raysgd.errors import CollectiveError, WorkerLostError
from raysgd.paths import without_secrets

__all__ = ["Controller"]

logger = logging.getLogger(__name__)

_SHUT_DOWN = "The workers are shut down."
_TICK_S = 1.0
"""How often to look at a call when there is nothing to look for but its end."""
_BUSY_TICK_S = 0.05
"""How often to look at it while replacement workers are on their way."""
_START_TICK_S = 0.01
"""How often to look at workers that come up while there is no group."""
_UNEVEN_TICK_S = 0.25
"""How often to look at it while some workers have returned and others have not."""


class Controller:
    """Executes what the state machine decides.

    Args:
        group: the workers; not started yet.
        runner: what every worker hosts.
        backend: what the workers communicate through; None with ``num_workers=1``.
        hook: function that each worker calls before anything else.
        timeout_s: bound for setting up and for joining a generation.
        elastic: what to do about losses.
        can_join: whether replacement workers can take the state of others and continue with them,
            as operators do. A training function cannot: the group grows by `grow`, a restart.
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
        self.state: State = machine.New()
        self._is_shut_down = False
        self._pid = os.getpid()
        self._group = group
        self._clock = group.clock
        self._backend = backend
        self._elastic = elastic = elastic or ElasticConfig()
        group.watch_hosts(elastic.driver_grace_s, stops_calls=can_join)
        self.recovery = recovery(
            rejoins=backend is None or backend.rejoins,
            in_place=elastic.in_place,
            can_join=can_join,
        )
        self._policy = machine.Policy(
            recovery=self.recovery,
            max_attempts=elastic.max_attempts,
            may_grow=elastic.grow and not group.options.inline,
            keeps_snapshots=elastic.snapshot_every is not None,
        )
        # pickled now: what cannot be sent is found before a worker starts
        created: tuple[Any, ...] = (hook, runner, backend, sys.path)
        if not group.options.inline:
            created = (
                sendable("initialization_hook", hook),
                sendable("the runner", runner),
                sendable("backend", backend),
                sys.path,
            )
        self.journal = journal = Journal(group, self.recovery.survivors_stay)
        self._commands = Commands(group, journal, self._check_open)
        # the driver's own worker stays, unless all restart
        of_driver = not elastic.in_place and not group.options.inline
        self.snapshots = SnapshotKeeper(of_driver, group)
        self._preemption = PreemptionWatch(group, journal, self.recovery.replaces)
        self._scale_up = ScaleUp(
            group,
            elastic,
            created,
            random.random,
            self._note_failed_replacement,
            timeout_s,
            can_join=can_join,
            rejoins=self.recovery.rejoins,
        )
        self._pauses = Pauses(self._commands)
        self._features: list[Feature] = [
            self.snapshots,
            self._preemption,
            self._scale_up,
            self._pauses,
        ]
        self.forming = GroupForming(
            group,
            journal,
            self._commands,
            self._scale_up,
            self.snapshots,
            backend,
            self.recovery,
            timeout_s,
            self._features,
            self._check_open,
        )
        self._call = Call()
        """The call under way."""
        self._reached = Progress()
        """How far training was when it began."""
        self._redo: Call | None = None
        """The call that repeats steps which were lost with all workers."""
        self._outcomes: list[Outcome] = []
        self._sent: dict[Member, Future[Outcome]] | None = None
        """The answers to the newest attempt; None before it is sent."""
        self._attempt: Attempt | None = None
        self._monitor: HealthMonitor | None = None
        self._split = 0
        """In how many parts to train batches in the next attempt; 0 for no change."""
        self._leaving: list[Member] = []
        """Members that leave at the next restart."""
        self._has_state = False
        """Whether the snapshot to restart from is the state of a worker, just taken."""
        self._has_started = False
        self._restart_since, self._num_before, self._left = 0.0, 0, ""

    # ---- life

    def start(self) -> None:
        """Start the workers and set them up; if that fails, none is left behind."""
        try:
            with self._until_shut_down():
                self._group.reserve(self._group.options.start_timeout_s)
                self._supervise(machine.StartRequested(self.min_workers))
        except BaseException:
            self.shutdown(force=True)
            raise

    def shutdown(self, force: bool = False) -> None:
        """End all workers."""
        busy = isinstance(self.state, machine.Running | machine.Starting | machine.Broken)
        self._is_shut_down = True
        self.state, _ = transition(self.state, machine.ShutDown(), self._policy)
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

    # ---- the loop

    def _supervise(self, event: machine.Event | None) -> None:
        """Execute what follows from an event, and from what happens then, until nothing does."""
        try:
            while event is not None:
                event = self._apply(event)
        except BaseException:
            if not self._is_shut_down:
                self._apply(machine.Aborted(reached_workers=self._sent is not None))
            raise

    def _apply(self, event: machine.Event) -> machine.Event | None:
        """Take the next state, and execute its actions; return what the last one came to."""
        self._check_open()
        self.state, actions = transition(self.state, event, self._policy)
        if self._is_shut_down:  # by another thread, just now
            self.state = machine.Closed()
            raise RuntimeError(_SHUT_DOWN)
        came_to = None
        for action in actions:
            came_to = self._execute(action)
        return came_to

    def _execute(self, action: machine.Action) -> machine.Event | None:
        match action:
            case Do.SURVEY:
                return self._survey()
            case Do.AWAIT_WORKERS:
                return self._await_workers()
            case Do.ASK_PROGRESS:
                return self.forming.ask_progress(self._who_moves)
            case machine.FormGroup():
                return self.forming.form_group(action, self._call)
            case Do.START_GROUP:
                return self.forming.start_group()
            case machine.RunCall():
                return self._run_call(action)
            case Do.RESCUE_STATE:
                return self._rescue_state()
            case Do.SAVE_STATE:
                self._save()
            case Do.KILL_STUCK:
                self._kill_stuck()
            case Do.INTERRUPT_CALL:
                self._interrupt_call()
            case Do.ABANDON_CALL:
                self._abandon_call()
            case Do.REMOVE_LOST:
                self._remove_lost()
            case Do.COLLECT_DEPARTING:
                self.forming.collect_departing(self.members, self._call)
            case Do.RESTART:
                self._restart()
            case Do.NOTE_START:
                self._note_start()
            case Do.DISCARD_WORKERS:
                self._discard_members()
            case machine.GiveUpState(why):
                logger.warning("All workers restart from the snapshot: %s.", why)
                self._discard_members()
            case Do.DROP_NEWCOMERS:
                self.forming.drop_newcomers()
            case Do.STOP_REPLACEMENTS:
                self._scale_up.stop()
            case Do.RAISE_ERROR:
                assert self.journal.error is not None
                raise self.journal.error
            case machine.Fail():
                raise self._failure(action)
            case Do.RETURN_OUTCOMES:
                pass  # `run` returns them
        return None

    # ---- calls

    def run(self, call: Call) -> list[Outcome]:
        """Make a call, or a further part of it, and return the outcomes.

        Raises:
            WorkerLostError: more losses than ``max_losses``, or not enough workers to be had.
            CollectiveError: workers could not communicate though all are alive.
            BaseException: what user code raised first, with the worker's traceback.
        """
        self._check_open()
        if isinstance(self.state, machine.Running | machine.Starting):
            raise RuntimeError(
                "Another call on these workers is under way, in another thread; wait for its end."
            )
        min_workers = 1 if call.any_size else self.min_workers
        budget = machine.Budget(
            in_call=True,
            min_workers=min_workers,
            max_losses=call.max_losses,
            num_losses=call.num_losses,
        )
        self._call, self._reached, self._redo, self._split = call, self.progress, None, 0
        try:
            with self._until_shut_down():
                if len(self.members) < min_workers:
                    self._scale_up.try_again()  # once a call: there their number has an end
                self._supervise(machine.CallRequested(budget))
                return self._outcomes
        finally:
            self._call, self._outcomes = Call(), []

    def _survey(self) -> machine.Event:
        """Look at who is there, who can join, and who has to leave."""
        if self.journal.lost and self.members:
            size = len(self.members)
            logger.warning("Going on with %d of %d workers.", size, self.max_workers)
        elif self.journal.lost:
            logger.warning("Starting all workers anew.")
        self.journal.lost = {}
        for feature in self._features:
            feature.poll({})
        joining, self._leaving = self._who_moves()
        return machine.Surveyed(
            num_workers=len(self.members),
            num_joining=len(joining),
            num_leaving=len(self._leaving),
            must_save=self._preemption.must_save and self._call.can_pause,
            is_behind=self._is_behind(),
            can_restart=self._can_restart(),
        )

    def _who_moves(self) -> tuple[list[Replacement], list[Member]]:
        """Return the replacement workers that join at the next step, and the members that leave."""
        ready = self._scale_up.ready()
        leaving = self._preemption.who_leaves(len(ready))
        return ready[: self.max_workers - len(self.members) + len(leaving)], leaving

    def _is_behind(self) -> bool:
        """Whether steps were lost with all workers, and there is a call that repeats them."""
        is_behind = self.progress.global_step < self._reached.global_step
        if is_behind and self._redo is None and self._call.catch_up is not None:
            self._redo = self._call.catch_up(self._reached)
            if self._redo is not None:
                logger.warning(
                    "Steps %d to %d were lost with all workers, and are trained again before %s().",
                    self.progress.global_step + 1,
                    self._reached.global_step,
                    self._call.request.name,
                )
        return is_behind and self._redo is not None

    def _can_restart(self) -> bool:
        is_new = self.progress.global_step == 0
        return self._policy.keeps_snapshots or is_new or self._has_state

    def _run_call(self, action: machine.RunCall) -> machine.Event:
        """Make one attempt at the call; it ends shortly after a failure."""
        self._sent, self._attempt, self._has_state = None, None, False
        self._pauses.cancel()
        call = self._call
        if action.is_redo:
            assert self._redo is not None
            call = self._redo
        elif action.begins:
            call.begin(self.members, furthest([self.progress, self._reached]))
        members = list(self.members if call.rank is None else [self.members[call.rank]])
        self.journal.seen_step = self.progress.global_step
        packed: Any = call.request.with_split(self._split) if self._split else call.request
        if not self._group.options.inline:
            what = f"the arguments of {call.request.name}"
            packed = self._group.shared(sendable(what, packed))
        self._check_open()
        self._sent = {}
        for member in members:
            self._sent[member] = member.work("call", packed)
        self._attempt = attempt = Attempt(self._sent, self._clock)
        self._watch(call, attempt)
        if attempt.failed:
            self._commands.stop(attempt)
        progress = {member: outcome.progress for member, outcome in attempt.outcomes.items()}
        if progress:
            self.journal.progress = furthest(list(progress.values()))
            self.journal.seen_step = self.progress.global_step
            self._preemption.poll(progress)
        self._split = self._new_split(attempt)
        if attempt.lost:
            return self.forming.note_lost(attempt.lost)
        interrupted = attempt.interrupted_by_us
        if attempt.failed:
            is_stopped = interrupted and attempt.first_error is None and call.may_repeat
            may_repeat = bool(self._split) or is_stopped
            if not may_repeat:
                self.journal.error = attempt.error()
                if attempt.first_error is not None:
                    said = repr(self.journal.error)
                    self.journal.record("user_error", [attempt.first_error[0]], cause=said)
            return machine.CallFailed(may_repeat=may_repeat)
        is_complete = not attempt.paused and not action.is_redo
        if is_complete:
            self.snapshots.poll(progress)
            self._outcomes = [attempt.outcomes[member] for member in members]
        return machine.CallReturned(is_complete=is_complete, interrupted=interrupted)

    def _watch(self, call: Call, attempt: Attempt) -> None:
        """Watch an attempt until all workers have returned, or one has failed."""
        monitor = self._monitor = HealthMonitor(
            attempt,
            self.journal.ranks,
            self._elastic.hang_timeout_s,
            self._clock,
            call.has_batches,
        )
        while attempt.under_way:
            self._check_open()
            is_busy = call.on_wait is not None or self._scale_up.under_way
            idle_s = _UNEVEN_TICK_S if attempt.outcomes else _TICK_S
            if attempt.settle(_BUSY_TICK_S if is_busy else idle_s):
                continue
            if self._group.is_cut_off():
                self._preemption.give_up_silent(attempt)
                continue  # the driver's host is cut off from all workers, which wait as well
            progress = self._commands.ask_progress()
            if call.on_wait is not None:
                call.on_wait(list(progress.values()))
            steps = [p.global_step for p in progress.values()]
            self.journal.seen_step = max([self.journal.seen_step, *steps])
            for feature in [monitor, *self._features]:
                if (event := feature.poll(progress)) is not None:
                    self._apply(event)
            if call.can_pause and self._pauses.step is None:
                moves = any(self._who_moves()) or self._preemption.must_save
                if moves and not self._pauses.request(attempt, progress, len(self.members)):
                    # some have passed the step, and will wait for the others: discard that step
                    self._interrupt_call()

    def _interrupt_call(self) -> None:
        assert self._attempt is not None
        self._attempt.interrupted_by_us = True
        self._commands.stop(self._attempt)

    def _abandon_call(self) -> None:
        """Stop the work after Ctrl-C, and find out how far the workers are."""
        pending = self._sent or {} if self._attempt is None else self._attempt.pending
        self._commands.busy |= pending
        self._commands.interrupt()
        if reached := list(self.ask_progress().values()):
            self.journal.progress = furthest(reached)

    def _kill_stuck(self) -> None:
        assert self._monitor is not None
        for member in self._monitor.stuck_members:
            cause = "no batch finished within hang_timeout_s"
            self.journal.record("hung", [member], cause=cause)
            logger.warning("Killing worker %d, which hangs.", self.journal.ranks[member])
            member.kill_process()

    def _new_split(self, attempt: Attempt) -> int:
        """Return in how many parts to train batches when a call is made again; 0: as they are.

        Memory has run out then, and no other error was the first.
        """
        if attempt.first_error is None or not attempt.first_error[1].split:
            return 0
        member, outcome = attempt.first_error
        self._call.num_splits += 1
        said = repr(outcome.value())
        self.journal.record("split", [member], cause=said, factor=outcome.split)
        logger.warning(
            "Worker %d ran out of memory after step %d. The step is done again unless its update "
            "was made, and from now on each batch is trained as %d parts that make one update: %s",
            self.journal.ranks[member],
            self.progress.global_step,
            outcome.split,
            without_secrets(said),
        )
        return outcome.split

    def stop(self, request: Request) -> None:
        """Interrupt what the workers do in addition to calls; the next call forms a generation.

        Args:
            request: what each idle worker answers when nothing runs there any more.
        """
        if not isinstance(self.state, machine.Closed):
            self._apply(machine.StopRequested())
            self._commands.finish(request)

    # ---- losses

    def _remove_lost(self) -> None:
        """Take lost workers out of the group."""
        for member, error in self.journal.lost.items():
            rank, said = self.journal.ranks.get(member, -1), cause_of(member, error)
            since = self._call.metrics_start_step.get(member, self.progress.global_step)
            # no survivor to ask: use the last polled progress
            step = max(self.progress.global_step, self.journal.seen_step)
            num_batches = max(0, step - since)
            self.journal.record("lost", [member], cause=said, num_batches=num_batches, step=step)
            self._call.causes.append(f"worker {rank} on {member.name}: {said}")
            logger.warning("Lost worker %d on %s: %s", rank, member.name, said)
            for feature in self._features:
                feature.on_loss(member, error)
            self._group.discard(member)
        self._call.num_losses = self.state.budget.num_losses
        self._scale_up.resized()

    def _failure(self, action: machine.Fail) -> Exception:
        if action.is_communication:
            return CollectiveError(action.why)
        member, error = next(iter(self.journal.lost.items()), (None, None))
        if member is not None:
            self._scale_up.poll({})
        return self.journal.failure(action.why, self._call.causes, member, error)

    def _rescue_state(self) -> machine.Event:
        """Take the newest state over from the workers that are left."""
        progress = self.snapshots.rescue(self._commands)
        if progress is not None:
            self.journal.progress, self._has_state = progress, True
        return machine.StateRescued(self._can_restart() or bool(self._leaving))

    def _save(self) -> None:
        """Take a snapshot, and let callbacks save at the next step."""
        self._sent, self._preemption.must_save = None, False
        self._rescue_state()
        self._call.at_once = True

    # ---- starts

    def _await_workers(self) -> machine.Event:
        """Wait until there are enough workers; for room that is not there, longer each time."""
        config, starting = self._elastic, not self.members
        min_workers = self.state.budget.min_workers
        missing = f"{len(self.members)} left, and min_workers={min_workers}"
        deadline, number = 0.0, 0
        while True:
            self._check_open()
            self._scale_up.tick(self.generation, starting)
            if starting and (error := self._scale_up.error) is not None:
                if isinstance(error, WorkerLostError) and (causes := self._call.causes):
                    raise self.journal.failure(str(error), causes, cause=error)
                raise error
            if self._scale_up.are_enough(min_workers):
                return machine.WorkersReady()
            now = self._clock.monotonic()
            is_short = len(self.members) + self._scale_up.coming() < min_workers
            if is_short and now >= deadline and not self._group.drains.is_ray_silent:
                room = self._group.room()
                if number == config.max_attempts:
                    why = f"{missing}, and no room for more: {room}"
                    raise self.journal.failure(why, self._call.causes)
                wait_s = backoff_s(number, config, random.random())
                self.journal.record("waiting", [], cause=missing, seconds=wait_s)
                deadline, number = now + wait_s, number + 1
                logger.warning(
                    "Too few workers (%s). Try %d of %d, for %.1f s: %s",
                    missing,
                    number,
                    config.max_attempts,
                    wait_s,
                    room,
                )
            self._clock.sleep(_START_TICK_S if starting else _BUSY_TICK_S)

    def _restart(self) -> None:
        """End the members; workers that come up will continue from the newest snapshot."""
        self._restart_since, self._num_before = self._clock.monotonic(), len(self.members)
        self._left = "; ".join(f"left {member.name}" for member in self._leaving)
        self._has_state |= bool(self._leaving)
        self._call.metrics_start_step = {}
        self._discard_members()
        if not self.recovery.joins:
            self._scale_up.stop()  # these only waited for room
        self._scale_up.begin()

    def _note_start(self) -> None:
        """Record that the workers have started, or restarted."""
        if not (self.recovery.joins and self._elastic.grow):
            self._scale_up.stop()  # those that are late would never be let in
        if not self._has_started:
            self._has_started = True
            self.journal.record("started", self.members)
            return
        step = self.progress.global_step
        if self.state.budget.has_begun:  # what was measured in the call is gone
            self._call.metrics_start_step = dict.fromkeys(self.members, step)
        has_grown = 0 < self._num_before < len(self.members)
        joining = self.members[self._num_before :] if has_grown else self.members
        kind: EventKind = "grown" if has_grown else "restarted"
        if self._left and len(self.members) >= self._num_before:
            kind = "moved"
        seconds = self._clock.monotonic() - self._restart_since
        self.journal.record(kind, joining, cause=self._left, seconds=seconds)
        logger.info("Restarted %d workers from step %d.", len(self.members), step)

    def grow(self) -> bool:
        """Restart with more workers, from what `snapshots` holds, if there is room for them now.

        Or without those that are going to be taken away, if enough are left or have room.

        Returns:
            Whether it did.
        """
        with self._until_shut_down():
            if self._group.drains.is_ray_silent:
                return False  # no worker could be started
            self._leaving = list(self._group.leaving())
            if self._leaving:
                num_staying = len(self.members) - len(self._leaving)
                num_vacant = sum(slot.is_ready for slot in self._group.vacant_slots())
                if num_staying + num_vacant < self.min_workers:
                    return False
            elif not self._scale_up.has_room():
                return False
            self._supervise(machine.StartRequested(self.min_workers))
        return True

    def _discard_members(self) -> None:
        for member in list(self.members):
            self._group.discard(member)

    def _note_failed_replacement(self, member: Member | None, error: BaseException) -> None:
        said = cause_of(member, error)
        self.journal.record("newcomer_failed", [] if member is None else [member], cause=said)
        logger.warning("A replacement worker failed before it joined: %s", said)

    # ---- what is known

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

    @property
    def generation(self) -> int:
        """Number of the newest generation."""
        return self.journal.generation

    @property
    def progress(self) -> Progress:
        """How far training is."""
        return self.journal.progress

    @property
    def events(self) -> list[Event]:
        """What happened to the group, oldest first."""
        return self.journal.events

    def ask_progress(self) -> Mapping[Member, Progress]:
        """Return the progress of every worker that answers, while they are busy."""
        return self._commands.ask_progress()

    def drain(self, node_id: str | None, rank: int | None, deadline_s: float | None) -> None:
        """Note that a node, or a worker, is going to be taken away; in any thread."""
        self._check_open()
        self._preemption.drain(node_id, rank, deadline_s)
