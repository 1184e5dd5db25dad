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
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, Literal

import cloudpickle

from raysgd.backends import Backend
from raysgd.context import Progress, Runner, WorkerContext
from raysgd.elastic.events import Event
from raysgd.elastic.policies import assign_contexts, choose_leader
from raysgd.errors import CollectiveError, WorkerLostError, WorkerTimeoutError
from raysgd.execution.group import WorkerGroup, gather
from raysgd.execution.members import Member, is_loss
from raysgd.execution.worker import Outcome

__all__ = ["State", "Supervisor"]

logger = logging.getLogger(__name__)

_Kind = Literal["started", "lost", "resumed", "user_error"]

_ROOT_CAUSE_S = 1.0
"""How long to look for the reason of a failed collective before the others are interrupted."""
_RETURN_S = 1.0
"""How long interrupted workers may take before the caller gets the exception without them."""
_NODE_LOSS_S = 10.0
"""How long Ray may take to notice that a node is gone, when all that is left of it is silence."""
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


@dataclass
class _Result:
    """What came of one call on all members."""

    outcomes: dict[Member, Outcome] = field(default_factory=dict)
    lost: dict[Member, BaseException] = field(default_factory=dict)
    first_error: tuple[Member, Outcome] | None = None

    def failed(self) -> bool:
        return bool(self.lost) or any(o.kind != "ok" for o in self.outcomes.values())

    def knows_cause(self) -> bool:
        return bool(self.lost) or self.first_error is not None


class Supervisor:
    """Runs calls on all workers of a group, through failures.

    Args:
        group: the workers; not started yet.
        make_runner: the runner that every worker hosts.
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
            self._ranks = {member: rank for rank, member in enumerate(self.members)}
            self._all("create", self._hook, self._runner, self._sent_backend, awaited="creation")
            contexts = self._contexts()
            self._each("prepare", [(context,) for context in contexts], awaited="preparation")
            self._enter(contexts, leader=None)
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

    def recovered_progress(self, max_losses: int) -> Progress:
        """Return how far training is, after mending a group that is broken."""
        self._make_ready([], max_losses)
        return self.progress

    # ---- calls

    def call(
        self,
        method: str,
        *,
        max_losses: int = 0,
        rank: int | None = None,
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
            members = self.members if rank is None else [self.members[rank]]
            result = self._run(members, method, arguments, on_wait)
            if not result.failed():
                self.state = State.READY
                self.progress = result.outcomes[members[0]].progress
                return [result.outcomes[member] for member in members]
            self.state = State.BROKEN
            if result.lost:
                self._drop(result.lost, causes, max_losses)
                self.losses_in_call = len(causes)
            elif result.first_error is not None:
                member, outcome = result.first_error
                error = outcome.exception()
                self._record("user_error", [member], cause=repr(error))
                raise error
            else:
                failed = next(o for o in result.outcomes.values() if o.kind != "ok")
                raise CollectiveError(
                    f"Workers could not communicate, though all of them are alive: {failed.value()}"
                ) from failed.exception()

    def _run(
        self,
        members: Sequence[Member],
        method: str,
        arguments: dict[str, Any],
        on_wait: Callable[[Sequence[Progress]], None] | None,
    ) -> _Result:
        """Make one attempt at a call. Returns when all workers have, or shortly after a failure."""
        packed: Any = arguments
        if not self._group.options.inline:
            packed = self._group.shared(_pickled(f"the arguments of {method}", arguments))
        self.state = State.RUNNING
        result = _Result()
        pending: dict[Future[Outcome], Member] = {}
        try:
            for member in members:
                pending[member.work("call", method, packed)] = member
            done_at: float | None = None
            while pending and not result.failed():
                self._settle(pending, result, 0.2 if on_wait else 1.0)
                if on_wait is not None and pending:
                    on_wait(self._all_progress())
                done_at = self._mention_uneven(pending, result, done_at)
            if result.failed():
                self._after_failure(pending, result)
        except BaseException:
            # Ctrl-C, most likely: stop the work, and let the next call find out how far it got
            self.state = State.BROKEN
            self._interrupt()
            self._stragglers = {member: future for future, member in pending.items()}
            raise
        return result

    def _settle(
        self, pending: dict[Future[Outcome], Member], result: _Result, timeout_s: float
    ) -> None:
        """Wait until a worker returns, at most `timeout_s`, and note what it returned."""
        done, _ = wait(pending, timeout=timeout_s, return_when=FIRST_COMPLETED)
        for future in done:
            member = pending.pop(future)
            error = future.exception()
            if error is None:
                outcome = result.outcomes[member] = future.result()
                if outcome.kind == "user" and result.first_error is None:
                    result.first_error = (member, outcome)
            elif is_loss(error):
                result.lost[member] = error
            else:
                raise error

    def _after_failure(self, pending: dict[Future[Outcome], Member], result: _Result) -> None:
        """Find the reason of a failure, and bring the other workers back."""
        started = time.monotonic()
        # a broken connection is seen by the peers of a dead worker before Ray tells of its death
        while pending and not result.knows_cause() and time.monotonic() < started + _ROOT_CAUSE_S:
            self._settle(pending, result, 0.05)
        self._interrupt()
        deadline = time.monotonic() + _RETURN_S
        while pending and time.monotonic() < deadline:
            self._settle(pending, result, deadline - time.monotonic())
        if not result.knows_cause():
            self._look_for_losses(pending, result)
        self._stragglers = {member: future for future, member in pending.items()}

    def _look_for_losses(self, pending: dict[Future[Outcome], Member], result: _Result) -> None:
        """Wait for Ray to notice a loss that the workers' broken connections point at."""
        deadline = time.monotonic() + _NODE_LOSS_S
        while pending and not result.lost and time.monotonic() < deadline:
            self._settle(pending, result, deadline - time.monotonic())

    def _interrupt(self) -> None:
        """Make the calls under way fail, on all members: a connection has two ends."""
        futures = [member.control("interrupt") for member in self.members]
        wait(futures, timeout=_RETURN_S)

    def _mention_uneven(
        self,
        pending: dict[Future[Outcome], Member],
        result: _Result,
        done_at: float | None,
    ) -> float | None:
        """Say, from time to time, which workers are still busy when others have returned."""
        if not result.outcomes or not pending:
            return None
        now = time.monotonic()
        if done_at is None:
            return now
        if now - done_at < _UNEVEN_S:
            return done_at
        logger.warning(
            "Workers %s have returned; still waiting for workers %s, which may be waiting for "
            "them in turn. Every worker needs the same number of collective operations.",
            _listed(self._ranks[member] for member in result.outcomes),
            _listed(self._ranks[member] for member in pending.values()),
        )
        return now

    def _all_progress(self) -> list[Progress]:
        """Return every worker's progress, while they are busy."""
        futures = [member.control("progress") for member in self.members]
        wait(futures, timeout=_RETURN_S)
        return [f.result() for f in futures if f.done() and f.exception() is None]

    # ---- generations

    def _make_ready(self, causes: list[str], max_losses: int) -> None:
        """Make a new generation where the last one is broken."""
        if self.state is State.CLOSED:
            raise RuntimeError("The workers are shut down.")
        started = time.monotonic()
        while self.state is State.BROKEN:
            lost = self._await_stragglers() or self._rejoin()
            if lost:
                self._drop(lost, causes, max_losses)
            else:
                self.state = State.READY
                self._record("resumed", self.members, seconds=time.monotonic() - started)

    def _await_stragglers(self) -> dict[Member, BaseException]:
        """Wait for workers that did not return in time; kill those that still do not."""
        stragglers, self._stragglers = self._stragglers, {}
        if not stragglers:
            return {}
        deadline = time.monotonic() + _STRAGGLER_S
        busy = {future: member for member, future in stragglers.items()}
        started = time.monotonic()
        while busy and time.monotonic() < deadline:
            done, _ = wait(busy, timeout=min(5.0, deadline - time.monotonic()))
            for future in done:
                del busy[future]
            if busy:
                logger.warning(
                    "Waiting up to %.0f s for workers %s, which are still busy with the call that "
                    "failed before.",
                    deadline - time.monotonic(),
                    _listed(self._ranks[member] for member in busy.values()),
                )
        lost: dict[Member, BaseException] = {
            member: error
            for member, future in stragglers.items()
            if future.done() and (error := future.exception()) is not None
        }
        for member in busy.values():
            if not member.remote:
                raise WorkerTimeoutError(
                    "The worker in the driver's process is still busy with the call that failed "
                    f"before, after {time.monotonic() - started:.0f} s.",
                    ranks=[self._ranks[member]],
                    waited_s=_STRAGGLER_S,
                )
            member.kill()
            lost[member] = WorkerTimeoutError(f"busy for {_STRAGGLER_S:g} s after it was stopped")
        return lost

    def _rejoin(self) -> dict[Member, BaseException]:
        """Let all members enter a new generation; returns those that were lost meanwhile."""
        futures = {member: member.control("progress") for member in self.members}
        wait(futures.values(), timeout=_NODE_LOSS_S)
        lost = _errors_of(futures)
        if lost:
            return lost
        reached = [futures[member].result() for member in self.members]
        leader = choose_leader(reached)
        self.progress = reached[leader]
        contexts = self._contexts()
        outcomes: dict[Member, Future[Outcome]] = self._submit_enter(contexts, leader)
        result = _Result()
        pending = {future: member for member, future in outcomes.items()}
        deadline = time.monotonic() + self._timeout_s
        while pending and not result.failed():
            if time.monotonic() > deadline:
                raise WorkerTimeoutError(
                    f"Waited {self._timeout_s:g} s for workers to join a new generation, in vain "
                    f"for {_listed(self._ranks[member] for member in pending.values())}."
                )
            self._settle(pending, result, 1.0)
        if result.failed():
            if self._backend is not None:
                self._backend.close()  # wakes those that still look for each other
            self._after_failure(pending, result)
            if not result.lost and result.first_error is not None:
                raise result.first_error[1].exception()
        self._ranks = {member: rank for rank, member in enumerate(self.members)}
        return result.lost

    def _drop(self, lost: dict[Member, BaseException], causes: list[str], max_losses: int) -> None:
        """Take lost workers out of the group; raise where the call cannot go on."""
        self.state = State.BROKEN
        options = self._group.options
        for member, error in lost.items():
            rank, said = self._ranks.get(member, -1), _first_line(error)
            self._record("lost", [member], cause=said)
            causes.append(f"worker {rank} on {member.name}: {said}")
            logger.warning("Lost worker %d on %s: %s", rank, member.name, said)
            member.kill()
            self._stragglers.pop(member, None)
        if any(member.remote is False for member in lost):
            raise next(iter(lost.values()))
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

    def _submit_enter(
        self, contexts: Sequence[WorkerContext], leader: int | None
    ) -> dict[Member, Future[Outcome]]:
        rendezvous = None
        if self._backend is not None:
            rendezvous = self._backend.prepare([m.place.node_ip for m in self.members])
        return {
            member: member.work("enter", context, rendezvous, leader)
            for member, context in zip(self.members, contexts, strict=True)
        }

    def _enter(self, contexts: Sequence[WorkerContext], leader: int | None) -> None:
        """Let all members enter a generation; raise the first failure as itself."""
        futures = self._submit_enter(contexts, leader)
        self._collect(list(futures.values()), "setup of the workers")

    def _all(self, method: str, *arguments: Any, awaited: str) -> None:
        self._each(method, [arguments] * len(self.members), awaited=awaited)

    def _each(self, method: str, arguments: Sequence[tuple[Any, ...]], *, awaited: str) -> None:
        futures = [
            member.work(method, *given)
            for member, given in zip(self.members, arguments, strict=True)
        ]
        self._collect(futures, f"{awaited} of the workers")

    def _collect(self, futures: Sequence[Future[Outcome]], awaited: str) -> None:
        """Wait for all outcomes during the start, but not beyond the first failure."""
        result = _Result()
        pending = dict(zip(futures, self.members, strict=True))
        deadline = time.monotonic() + self._timeout_s
        for seconds in itertools.count(1):
            if not pending or result.failed():
                break
            if time.monotonic() > deadline:
                gather(futures, 0.0, awaited)
            self._settle(pending, result, 1.0)
            if seconds % 30 == 0:
                logger.warning("Still waiting for the %s (%d to go).", awaited, len(pending))
        if not result.failed():
            return
        self._after_failure(pending, result)
        if result.first_error is not None:
            raise result.first_error[1].exception()
        if result.lost:
            self._drop(result.lost, [], 0)
        failed = next(o for o in result.outcomes.values() if o.kind != "ok")
        raise CollectiveError(f"The {awaited} failed: {failed.value()}") from failed.exception()


def _pickled(what: str, value: Any) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"Cannot send {what} to the workers, because it cannot be pickled: {error}. Create "
            "such objects in setup() instead, which runs on the workers."
        ) from error
    return pickled


def _errors_of(futures: dict[Member, Future[Any]]) -> dict[Member, BaseException]:
    """Return the members whose futures failed, or did not come."""
    silent = WorkerTimeoutError(f"no answer within {_NODE_LOSS_S:g} s")
    found: dict[Member, BaseException] = {}
    for member, future in futures.items():
        error = future.exception() if future.done() else silent
        if error is not None:
            found[member] = error
    return found


def _listed(ranks: Any) -> str:
    return ", ".join(str(rank) for rank in sorted(ranks))


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3]) if lines else type(error).__name__
