"""The loop that runs calls on all workers and decides what follows when one of them fails.

States of the group::

    NEW ──start──▶ READY ──call──▶ RUNNING ──all done──▶ READY
                     ▲                │
                     │             a failure: the other workers are interrupted
                  rejoin              ▼
                     └──────────── BROKEN          (any state) ──shutdown──▶ CLOSED

BROKEN means that the workers are alive but their process group is not, or that members are
missing. The next call, or the repetition of the one that lost a worker, first makes a new
generation: new ranks, a new process group, the state of the worker with most committed steps.
"""

from __future__ import annotations

import enum
import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Literal

import cloudpickle

from raysgd.backends import Backend
from raysgd.context import Progress, Runner, WorkerContext
from raysgd.elastic.events import Event
from raysgd.elastic.policies import assign_contexts, choose_leader
from raysgd.errors import WorkerLostError, WorkerTimeoutError
from raysgd.execution.attempt import Attempt
from raysgd.execution.group import WorkerGroup
from raysgd.execution.members import Member
from raysgd.execution.worker import Outcome

__all__ = ["State", "Supervisor"]

logger = logging.getLogger(__name__)

_Kind = Literal["started", "lost", "resumed", "user_error"]

_ANSWER_S = 0.7
"""How long a worker may take to answer a control call."""
_SILENCE_S = 10.0
"""After how long a worker that answers no control call counts as lost."""
_STRAGGLER_S = 60.0
"""How long the next call waits for workers that are still busy with one that failed."""
_UNEVEN_S = 30.0
"""After how long to say that workers which are done wait for others."""


class State(enum.Enum):
    """What the group is doing, see the module's docstring."""

    NEW = enum.auto()
    READY = enum.auto()
    RUNNING = enum.auto()
    BROKEN = enum.auto()
    CLOSED = enum.auto()


class Supervisor:
    """Runs calls on all workers of a group, through failures.

    Args:
        group: the workers; not started yet.
        runner: what every worker hosts.
        backend: what the workers communicate through; None with ``num_workers=1``.
        hook: function that each worker calls before anything else.
        timeout_s: bound for setting up and for joining a generation.
    """

    def __init__(
        self,
        group: WorkerGroup,
        runner: Runner,
        backend: Backend | None,
        hook: Callable[[], None] | None,
        timeout_s: float,
    ) -> None:
        self.state = State.NEW
        self._group = group
        self._backend = backend
        self._timeout_s = timeout_s
        self._generation = 0
        self.progress = Progress()
        """How far training is, as of the last call or the last new generation."""
        self.events: list[Event] = []
        """What happened to the group, oldest first."""
        self.losses_in_call = 0
        """Workers that were lost in the newest call."""
        self._stragglers: dict[Member, Future[Outcome]] = {}
        self._ranks: dict[Member, int] = {}
        # pickled now: what cannot be sent is found before a worker starts
        self._hook: Any = hook
        self._runner: Any = runner
        self._sent_backend: Any = backend
        if not group.options.inline:
            self._hook = _pickled("initialization_hook", hook)
            self._runner = _pickled("training_operator_cls and config", runner)
            self._sent_backend = _pickled("backend", backend)

    # ---- life

    def start(self) -> None:
        """Start the workers and set them up; if that fails, none is left behind."""
        try:
            started = time.monotonic()
            self._group.start()
            self._number_members()
            created = (self._hook, self._runner, self._sent_backend, sys.path)
            self._first_step("create", [created] * len(self.members), "start")
            contexts = self._contexts()
            self._first_step("prepare", [(context,) for context in contexts], "get ready")
            self._raise_failure(self._enter(contexts, leader=None))
            self.state = State.READY
            self._record("started", self.members, seconds=time.monotonic() - started)
        except BaseException:
            self.shutdown(force=True)
            raise

    def shutdown(self, force: bool = False) -> None:
        """End all workers."""
        if self.state is State.CLOSED:
            return
        busy = self.state in (State.RUNNING, State.BROKEN)
        self.state = State.CLOSED
        self._group.shutdown(force or busy)
        if self._backend is not None:
            self._backend.close()

    @property
    def members(self) -> list[Member]:
        """The workers, in the order of their ranks."""
        return self._group.members

    @property
    def max_workers(self) -> int:
        """The most workers that the group may have."""
        return self._group.options.num_workers

    # ---- calls

    def call(
        self,
        method: str,
        *,
        max_losses: int = 0,
        rank: int | None = None,
        arguments_from: Callable[[Progress], dict[str, Any]] | None = None,
        on_wait: Callable[[Sequence[Progress]], None] | None = None,
        **arguments: Any,
    ) -> list[Outcome]:
        """Call a method of the runner on every worker, or on one, and return the outcomes.

        Args:
            method: name of the method.
            max_losses: how many workers may be lost in this call. After each loss the survivors
                make a new generation and the call is made again, so it must say what it wants
                to reach in absolute terms.
            rank: the only worker to call.
            arguments_from: returns further arguments from how far training is as the call begins.
            on_wait: called with every worker's progress while the call runs.
            arguments: keyword arguments of the method.

        Raises:
            WorkerLostError: more workers were lost, or too few are left.
            CollectiveError: workers could not communicate though all are alive.
            BaseException: what user code raised first, with the worker's traceback.
        """
        causes: list[str] = []
        self.losses_in_call = 0
        while True:
            self._make_ready(causes, max_losses)
            if arguments_from is not None:
                arguments = {**arguments, **arguments_from(self.progress)}
                arguments_from = None
            members = self.members if rank is None else [self.members[rank]]
            attempt = self._run(members, method, arguments, on_wait)
            if not attempt.failed:
                self.state = State.READY
                self.progress = attempt.outcomes[members[0]].progress
                return [attempt.outcomes[member] for member in members]
            if attempt.outcomes:
                reached = [outcome.progress for outcome in attempt.outcomes.values()]
                self.progress = reached[choose_leader(reached)]
            if attempt.lost:
                self._drop(attempt.lost, causes, max_losses)
                continue
            error = attempt.error()
            if attempt.first_error is not None:
                self._record("user_error", [attempt.first_error[0]], cause=repr(error))
            raise error

    def _run(
        self,
        members: Sequence[Member],
        method: str,
        arguments: dict[str, Any],
        on_wait: Callable[[Sequence[Progress]], None] | None,
    ) -> Attempt:
        """Make one attempt at a call. Returns when all workers have, or shortly after a failure."""
        packed: Any = arguments
        if not self._group.options.inline:
            packed = self._group.shared(_pickled(f"the arguments of {method}", arguments))
        attempt = Attempt({})
        try:
            self.state = State.RUNNING
            attempt = Attempt({member: member.work("call", method, packed) for member in members})
            mentioned = time.monotonic()
            while attempt.under_way:
                attempt.settle(0.2 if on_wait else 1.0)
                if on_wait is not None:
                    on_wait(self._all_progress())
                mentioned = self._mention_uneven(attempt, mentioned)
            if attempt.failed:
                self._end(attempt)
        except BaseException:
            # Ctrl-C, most likely: stop the work, and let the next call find out how far it got
            self.state = State.BROKEN
            self._stragglers = attempt.pending
            self._interrupt()
            raise
        return attempt

    def _end(self, attempt: Attempt) -> None:
        """Find out why an attempt failed, and stop what is left of it."""
        self.state = State.BROKEN
        attempt.find_reason(self._interrupt)
        self._stragglers = attempt.pending

    def _interrupt(self) -> None:
        """Make the calls under way fail, on all members: a connection has two ends."""
        wait([member.control("interrupt") for member in self.members], timeout=_ANSWER_S)

    def _mention_uneven(self, attempt: Attempt, mentioned: float) -> float:
        """Say, from time to time, which workers are still busy when others have returned."""
        now = time.monotonic()
        if not attempt.outcomes or not attempt.pending:
            return now
        if now - mentioned < _UNEVEN_S:
            return mentioned
        logger.warning(
            "Workers %s have returned; still waiting for workers %s, which may be waiting for "
            "them in turn. Every worker needs the same number of collective operations.",
            self._listed(attempt.outcomes),
            self._listed(attempt.pending),
        )
        return now

    def _all_progress(self) -> list[Progress]:
        """Return every worker's progress, while they are busy."""
        futures = [member.control("progress") for member in self.members]
        wait(futures, timeout=_ANSWER_S)
        return [f.result() for f in futures if f.done() and f.exception() is None]

    # ---- generations

    def _make_ready(self, causes: list[str], max_losses: int) -> None:
        """Make a new generation where the last one is broken."""
        if self.state is State.CLOSED:
            raise RuntimeError("The workers are shut down.")
        if self.state is State.RUNNING:
            raise RuntimeError(
                "Another call on these workers is under way, in another thread; wait for its end."
            )
        started = time.monotonic()
        while self.state is State.BROKEN:
            lost = self._await_stragglers() or self._rejoin()
            if lost:
                self._drop(lost, causes, max_losses)
            else:
                self.state = State.READY
                self._record("resumed", self.members, seconds=time.monotonic() - started)

    def _await_stragglers(self) -> dict[Member, BaseException]:
        """Wait for workers that did not return in time; those that still do not are lost."""
        stragglers = Attempt(self._stragglers)
        deadline = time.monotonic() + _STRAGGLER_S
        try:
            while stragglers.pending and (left := deadline - time.monotonic()) > 0:
                stragglers.settle(min(5.0, left))
                if stragglers.pending and left < _STRAGGLER_S - 5:
                    logger.warning(
                        "Waiting up to %.0f s for workers %s, which are still busy with the call "
                        "that failed before.",
                        left,
                        self._listed(stragglers.pending),
                    )
        finally:
            self._stragglers = stragglers.pending
        why = f"still busy {_STRAGGLER_S:g} s after it was stopped"
        for member in stragglers.pending:
            if not member.remote:  # it cannot be killed
                raise WorkerTimeoutError(
                    f"The worker in the driver's process is {why}.",
                    ranks=[self._ranks[member]],
                    waited_s=_STRAGGLER_S,
                )
        return stragglers.lost | {m: WorkerTimeoutError(why) for m in stragglers.pending}

    def _rejoin(self) -> dict[Member, BaseException]:
        """Let all members enter a new generation; returns those that were lost meanwhile."""
        asked = {member: member.control("progress") for member in self.members}
        wait(asked.values(), timeout=_SILENCE_S)
        lost = {member: error for member, f in asked.items() if (error := _error_of(f))}
        if lost:
            return lost
        reached = [asked[member].result() for member in self.members]
        leader = choose_leader(reached)
        self.progress = reached[leader]
        attempt = self._enter(self._contexts(), leader)
        if attempt.failed and not attempt.lost:
            raise attempt.error()
        if not attempt.failed:
            self._number_members()
        return attempt.lost

    def _drop(self, lost: dict[Member, BaseException], causes: list[str], max_losses: int) -> None:
        """Take lost workers out of the group; raise where the call cannot go on."""
        self.state = State.BROKEN
        options = self._group.options
        for member, error in lost.items():
            rank, said = self._ranks.get(member, -1), _first_line(error)
            self._record("lost", [member], cause=said)
            causes.append(f"worker {rank} on {member.name}: {said}")
            self.losses_in_call = len(causes)
            logger.warning("Lost worker %d on %s: %s", rank, member.name, said)
            member.kill()
            self._stragglers.pop(member, None)
        survivors = [member for member in self.members if member not in lost]
        self._group.members[:] = survivors
        first, error = next(iter(lost.items()))
        if len(causes) > max_losses:
            why = f"{len(causes)} lost in one call, and max_retries={max_losses}"
        elif len(survivors) < options.min_workers:
            why = f"{len(survivors)} left, and min_workers={options.min_workers}"
        else:
            logger.warning("Going on with %d of %d workers.", len(survivors), options.num_workers)
            return
        raise WorkerLostError(
            f"Training run failed ({why}):\n" + "\n".join(causes),
            rank=self._ranks.get(first, -1),
            node_id=first.place.node_id,
            cause=_first_line(error),
        ) from error

    # ---- helpers

    def _record(
        self, kind: _Kind, members: Sequence[Member], *, cause: str = "", seconds: float = 0.0
    ) -> None:
        self.events.append(
            Event(
                kind=kind,
                generation=self._generation,
                ranks=tuple(self._ranks.get(member, -1) for member in members),
                nodes=tuple(member.place.node_id for member in members),
                step=self.progress.global_step,
                cause=cause,
                seconds=seconds,
            )
        )

    def _contexts(self) -> list[WorkerContext]:
        self._generation += 1
        options = self._group.options
        return assign_contexts(
            [member.place for member in self.members],
            generation=self._generation,
            distributed=self._backend is not None,
            num_cpus=options.num_cpus,
        )

    def _enter(self, contexts: Sequence[WorkerContext], leader: int | None) -> Attempt:
        """Let all members enter a generation."""
        rendezvous = None
        if self._backend is not None:
            rendezvous = self._backend.prepare([m.place.node_ip for m in self.members])
        arguments = [(context, rendezvous, leader) for context in contexts]
        what = "set up" if leader is None else "join a new generation"
        return self._step("enter", arguments, what)

    def _step(self, method: str, arguments: Sequence[tuple[Any, ...]], what: str) -> Attempt:
        """Let every member take one step of a start or a rejoin, within the bound for those."""
        attempt = Attempt(
            {m: m.work(method, *a) for m, a in zip(self.members, arguments, strict=True)}
        )
        deadline = time.monotonic() + self._timeout_s
        mentioned = time.monotonic()
        while attempt.under_way:
            attempt.settle(1.0)
            now = time.monotonic()
            if now > deadline:
                waiting = self._listed(attempt.pending)
                self._end(attempt)
                raise WorkerTimeoutError(
                    f"Waited {self._timeout_s:g} s (timeout_s) for the workers to {what}, in vain "
                    f"for {waiting}.",
                    waited_s=self._timeout_s,
                )
            if now - mentioned > _UNEVEN_S:
                logger.warning(
                    "Still waiting for workers %s to %s.", self._listed(attempt.pending), what
                )
                mentioned = now
        if attempt.failed:
            if self._backend is not None:
                self._backend.close()  # wakes those that still look for each other
            self._end(attempt)
        return attempt

    def _first_step(self, method: str, arguments: Sequence[tuple[Any, ...]], what: str) -> None:
        """Let every member take one step of the start; raise where one fails."""
        self._raise_failure(self._step(method, arguments, what))

    def _raise_failure(self, attempt: Attempt) -> None:
        if not attempt.failed:
            return
        for member, error in attempt.lost.items():
            raise WorkerLostError(
                f"Lost worker {self._ranks[member]} on {member.name} while the workers were "
                f"starting: {_first_line(error)}",
                rank=self._ranks[member],
                node_id=member.place.node_id,
                cause=_first_line(error),
            ) from error
        raise attempt.error()

    def _number_members(self) -> None:
        self._ranks = {member: rank for rank, member in enumerate(self.members)}

    def _listed(self, members: Iterable[Member]) -> str:
        return ", ".join(str(rank) for rank in sorted(self._ranks[member] for member in members))


def _pickled(what: str, value: Any) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"Cannot send {what} to the workers, because it cannot be pickled: {error}. Create "
            "such objects in setup() instead, which runs on the workers."
        ) from error
    return pickled


def _error_of(answer: Future[Any]) -> BaseException | None:
    """Return why a control call failed, which may be silence."""
    if not answer.done():
        return WorkerTimeoutError(f"no answer within {_SILENCE_S:g} s")
    return answer.exception()


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3]) if lines else type(error).__name__
