"""Remote procedure calls from the driver to several workers, and their outcomes."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from typing import Any, Literal, NamedTuple

from raysgd._internal.runner import Request
from raysgd._internal.worker_status import WorkerStatus
from raysgd.cluster.clock import Clock
from raysgd.cluster.large_values import Inbox
from raysgd.cluster.serialization import pack, pack_as
from raysgd.cluster.worker import Outcome, Worker
from raysgd.cluster.worker_handle import ROOT_CAUSE_S, WorkerHandle, is_worker_failure
from raysgd.elastic.group_record import GroupRecord, list_ranks
from raysgd.errors import CollectiveError, WorkerTimeoutError

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""Seconds between two checks of the workers that have not answered."""
FAST_POLL_S = 0.05
"""The same interval while workers start or progress is shown."""
ANSWER_S = 0.7
"""Seconds that idle workers may take to answer a short request."""
_RETURN_S = 0.7
"""Seconds that interrupted workers may take to return."""
_NODE_LOSS_S = 10.0
"""Seconds that Ray may take to report a lost node."""
_STOPPED_S = 10.0
"""Seconds that a stopped process may take to answer."""
_RESCUE_S = 10.0
"""Seconds that a worker may take to send its state before all workers restart."""
_ASK_AGAIN_S = 0.05
"""Seconds to wait before a worker whose answer was lost is asked again."""
_LOG_BUSY_AFTER_S = 5.0
"""Seconds after which to log that workers are still busy with an interrupted call."""

GroupStatus = Literal["broken", "ready", "running"]
"""``broken`` if workers or their process group are missing. The next call repairs it."""
LostWorkers = Mapping[WorkerHandle, BaseException]
"""Lost workers with their causes."""


class AttemptResult(NamedTuple):
    """How an attempt at a call, or to form a generation, has ended."""

    group_status: GroupStatus
    """The status of the group from now on."""
    lost: Mapping[WorkerHandle, BaseException] = {}
    """Lost members."""
    error: BaseException | None = None
    """What `Controller.run` raises. None to repeat the attempt."""
    outcomes: Sequence[Outcome] | None = None
    """Outcomes of a complete call, by rank. None if it paused, or repeated earlier steps."""


class Attempt:
    """Collects the outcomes of a request to several workers, or of a stage of a start or a rejoin.

    Causes are lost workers, the first user error, and `why_new_generation`, but no collectives.
    """

    def __init__(self, futures: Mapping[WorkerHandle, Future[Outcome]], clock: Clock) -> None:
        self._clock = clock
        self.members = list(futures)
        self.pending = dict(futures)
        self.outcomes: dict[WorkerHandle, Outcome] = {}
        self.lost: dict[WorkerHandle, BaseException] = {}
        self.first_user_error: tuple[WorkerHandle, Outcome] | None = None
        self.why_new_generation: BaseException | None = None
        """Why the attempt fails and the next generation repeats it, though no worker has failed."""

    def add(self, member: WorkerHandle, future: Future[Outcome]) -> None:
        self.members.append(member)
        self.pending[member] = future

    @property
    def is_running(self) -> bool:
        return bool(self.pending) and not self.has_failed

    @property
    def has_failed(self) -> bool:
        kinds = {outcome.kind for outcome in self.outcomes.values()}
        return self.is_cause_known or not kinds <= {"ok", "paused"}

    @property
    def is_cause_known(self) -> bool:
        """Whether the attempt has a cause, or needs none."""
        return bool(self.lost or self.first_user_error or self.why_new_generation is not None)

    @property
    def min_splits(self) -> int:
        """Number of micro-batches per batch that the next attempt needs, or 0 for no change."""
        return 0 if self.first_user_error is None else self.first_user_error[1].min_splits

    def collect(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for an outcome. Return whether one has arrived."""
        waiting = self._clock.wait(self.pending.values(), timeout_s, FIRST_COMPLETED)
        finished = [member for member, future in self.pending.items() if future not in waiting]
        for member in finished:
            future = self.pending.pop(member)
            if (error := future.exception()) is None:
                outcome = self.outcomes[member] = future.result()
                if outcome.kind == "user_error" and self.first_user_error is None:
                    self.first_user_error = (member, outcome)
                elif outcome.kind == "cut_off":
                    self.why_new_generation = outcome.exception()
            elif member.may_be_alive(error):  # its outcome will never come
                self.why_new_generation = error
            elif is_worker_failure(error):
                self.lost[member] = error
            else:
                raise error
        return bool(finished)

    def collect_until(self, timeout_s: float, ends_at_cause: bool = False) -> None:
        """Wait up to `timeout_s` seconds until all have returned, or until a cause is known."""
        now = self._clock.monotonic
        deadline = now() + timeout_s
        while self.pending and now() < deadline and not (ends_at_cause and self.is_cause_known):
            self.collect(deadline - now())

    def make_result(self, is_replay: bool, can_repeat: bool) -> AttemptResult:
        """Return how an attempt at a call has ended.

        The first line that applies::

            no failure, in a replay or at a pause   ready    continue the call
            no failure                              ready    return the outcomes
            lost workers                            broken   replace them, and repeat
            out of memory, if more splits help      broken   repeat
            other user error                        broken   raise it
            `why_new_generation`, if `can_repeat`   broken   repeat
            otherwise                               broken   raise an error
        """
        if not self.has_failed:
            outcomes = [self.outcomes[member] for member in self.members]
            is_partial = is_replay or any(outcome.kind == "paused" for outcome in outcomes)
            return AttemptResult("ready", outcomes=None if is_partial else outcomes)
        if self.lost:
            return AttemptResult("broken", lost=self.lost)
        can_repeat = can_repeat and self.why_new_generation is not None
        repeats = can_repeat if self.first_user_error is None else self.min_splits > 0
        return AttemptResult("broken", error=None if repeats else self.make_error())

    def make_error(self) -> BaseException:
        """Return the exception to raise for a failure without a lost worker."""
        if self.first_user_error is not None:
            return self.first_user_error[1].exception()
        reasons = (o.exception() for o in self.outcomes.values() if o.kind not in ("ok", "paused"))
        reason = next(reasons, self.why_new_generation)
        error = CollectiveError(
            f"All workers are alive, but could not communicate: {reason}. Check that all workers "
            "make the same backward passes and call the same collectives, in the same order."
        )
        error.__cause__ = reason
        return error


class GroupRpc:
    """Calls methods of all members, and tracks which have not returned."""

    def __init__(
        self, record: GroupRecord, check_open: Callable[[], None], timeout_s: float
    ) -> None:
        self._group, self._record = record.group, record
        self.check_open, self.timeout_s = check_open, timeout_s
        self._abandoned: dict[WorkerHandle, Future[Outcome]] = {}
        self._pausing_generation: int | None = None

    @property
    def unfinished(self) -> dict[WorkerHandle, Future[Outcome]]:
        """Workers whose call has failed, or still runs, since the driver stopped waiting for it."""
        return {
            member: future
            for member, future in self._abandoned.items()
            if self._group.slot_of(member) and not (future.done() and not future.exception())
        }

    @property
    def is_pausing(self) -> bool:
        """Whether the workers of this generation know the step at which they pause."""
        return self._pausing_generation == self._record.generation

    def poll_status(self, acknowledged_step: int = -1) -> dict[WorkerHandle, WorkerStatus]:
        """Return the statuses of the members that answer while they are busy.

        The members release their points up to `acknowledged_step`.
        """
        return self._call_control(self._group.members, Worker.status, acknowledged_step)

    def pause_at(self, step: int | None) -> dict[WorkerHandle, int]:
        """Send all members the step at which to pause. Return the current steps of members."""
        generation = self._record.generation
        self._pausing_generation = None if step is None else generation
        return self._call_control(self._group.members, Worker.pause_at, generation, step)

    def interrupt(self, attempt: Attempt) -> None:
        """Make an attempt fail on all members, because each may wait for any other."""
        self._abandoned |= attempt.pending
        members = dict.fromkeys([*self._group.members, *attempt.members])
        self._call_control(members, Worker.interrupt, self._record.generation)

    def interrupt_survivors(self, attempt: Attempt) -> None:
        """Find the cause of a failure, interrupt the other workers, and wait briefly for them."""
        attempt.collect_until(ROOT_CAUSE_S, ends_at_cause=True)  # a consequence may come first
        self.interrupt(attempt)
        attempt.collect_until(_RETURN_S)  # survivors return
        attempt.collect_until(_NODE_LOSS_S, ends_at_cause=True)  # Ray reports a lost node late
        self._abandoned = self.unfinished

    def interrupt_and_send(self, request: Request) -> None:
        """Interrupt the members, and send a request to those that are idle."""
        unfinished = self.unfinished  # they were interrupted before
        idle = [member for member in self._group.members if member not in unfinished]
        self._call_control(idle, Worker.interrupt, self._record.generation)
        packed = pack_as(request.name, request)
        futures = {member: member.submit_work(Worker.handle, packed) for member in idle}
        self._group.clock.wait(futures.values(), ANSWER_S)
        self._abandoned |= futures  # the next call detects lost workers among them

    def _call_control(
        self, members: Iterable[WorkerHandle], method: Any, *arguments: Any
    ) -> dict[WorkerHandle, Any]:
        """Call a control method of workers. Return the answers of those that answer soon."""
        futures = {member: member.submit_control(method, *arguments) for member in members}
        self._group.clock.wait(futures.values(), ANSWER_S)
        return results_of(futures)

    def send_to_idle(
        self,
        members: Sequence[WorkerHandle],
        request: Request,
        timeout_s: float = _RESCUE_S,
        inbox: Inbox | None = None,
    ) -> dict[WorkerHandle, Outcome]:
        """Send a request to idle members. Return the outcomes of those that succeed.

        Log the other outcomes. Later requests detect lost workers.
        """
        packed, method = pack(request), Worker.handle
        futures = {m: m.submit_work(method, packed, inbox and inbox.expect()) for m in members}
        self._group.clock.wait(futures.values(), timeout_s)
        outcomes: dict[WorkerHandle, Outcome] = results_of(futures)
        for member in [each for each, outcome in outcomes.items() if outcome.kind != "ok"]:
            where, error = list_ranks(self._record.ranks, [member]), outcomes.pop(member).unpack()
            logger.warning("%s failed on worker %s: %r", request.name, where, error)
        return outcomes

    def await_unfinished(self, patience_s: float) -> dict[WorkerHandle, BaseException]:
        """Wait for workers that are busy with an interrupted call. Return the lost ones.

        Workers that are still busy after `patience_s` are lost.
        """
        attempt = Attempt(self.unfinished, self._group.clock)
        try:
            log_after_s = min(_LOG_BUSY_AFTER_S, patience_s)
            attempt.collect_until(log_after_s)
            if attempt.pending and log_after_s < patience_s:
                logger.warning(
                    "Waiting up to %.0f s for workers %s, which are still busy with a failed call.",
                    patience_s - log_after_s,
                    list_ranks(self._record.ranks, attempt.pending),
                )
                attempt.collect_until(patience_s - log_after_s)
        finally:
            self._abandoned = attempt.pending
        why = f"it was still busy {patience_s:g} s after it was stopped"
        if not all(member.is_remote for member in attempt.pending):  # the driver cannot kill itself
            raise WorkerTimeoutError(
                f"The worker in the driver's process did not stop within {patience_s:g} s."
            )
        return attempt.lost | {m: WorkerTimeoutError(why) for m in attempt.pending}

    def probe_or_kill(
        self, members: Iterable[WorkerHandle]
    ) -> tuple[dict[WorkerHandle, WorkerStatus], dict[WorkerHandle, BaseException]]:
        """Return the statuses of workers, and the lost workers. Kill workers that do not answer.

        A worker may answer late because it holds the GIL. Wait for it up to `timeout_s`. A stopped
        process may take `_STOPPED_S`.
        """
        futures = {member: member.submit_control(Worker.status) for member in members}
        lost: dict[WorkerHandle, BaseException] = {}
        began = checked_at = self._group.clock.monotonic()
        while True:
            self._group.clock.wait(futures.values(), POLL_S)
            now = self._group.clock.monotonic()
            if self._group.is_cut_off():
                began = checked_at = now
            # Ask again: Ray loses answers if its connection breaks, after 20 s without a network.
            unavailable = [m for m, error in _errors_of(futures).items() if m.may_be_alive(error)]
            if now - began >= _STOPPED_S:
                unavailable = []
            silent = [member for member, future in futures.items() if not future.done()]
            if not (unavailable or silent):
                break
            if now - checked_at >= _STOPPED_S:
                checked_at = now
                lost |= self._find_unresponsive(silent, now - began)
                futures = {m: future for m, future in futures.items() if m not in lost}
            if unavailable:
                self._group.clock.sleep(_ASK_AGAIN_S)
            futures |= {member: member.submit_control(Worker.status) for member in unavailable}
            self.check_open()
        for member in lost:  # the process may still exist
            member.kill_process()
        return results_of(futures), lost | _errors_of(futures)

    def _find_unresponsive(
        self, silent: Sequence[WorkerHandle], waited_s: float
    ) -> dict[WorkerHandle, BaseException]:
        """Return the workers to declare lost: stopped ones, and all of them after `timeout_s`."""
        why = f"no answer within {waited_s:.0f} s"
        if waited_s < max(self.timeout_s, _STOPPED_S):
            states = {member: member.ask_if_stopped() for member in silent}
            self._group.clock.wait(states.values(), _STOPPED_S)
            stopped = [member for member, is_stopped in results_of(states).items() if is_stopped]
            return dict.fromkeys(stopped, WorkerTimeoutError(f"its process is stopped: {why}"))
        return dict.fromkeys(silent, WorkerTimeoutError(f"{why} (timeout_s)"))


def _errors_of(futures: Mapping[WorkerHandle, Future[Any]]) -> dict[WorkerHandle, BaseException]:
    return {m: error for m, f in futures.items() if f.done() and (error := f.exception())}


def results_of(futures: Mapping[WorkerHandle, Future[Any]]) -> dict[WorkerHandle, Any]:
    """Return the results of the calls that have succeeded."""
    return {m: f.result() for m, f in futures.items() if f.done() and f.exception() is None}
