"""Short calls from the driver to the members. Most run in parallel with the members' work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from raysgd._internal.context import Progress, Request
from raysgd.cluster.serialization import pack, sendable
from raysgd.cluster.worker import Outcome
from raysgd.cluster.worker_group import WorkerGroup
from raysgd.cluster.worker_handle import WorkerHandle, is_loss
from raysgd.elastic.attempt import Attempt
from raysgd.elastic.journal import Journal
from raysgd.errors import WorkerTimeoutError

ANSWER_S = 0.7
_SILENCE_S = 10.0
_SALVAGE_S = 10.0
"""Seconds that a worker may take to send its state before all workers restart."""
_LOOK_EVERY_S = 1.0
_ASK_AGAIN_S = 0.05


class Commands:
    """Sends requests to all members, and tracks which of them are busy."""

    def __init__(
        self, group: WorkerGroup, journal: Journal, check_open: Callable[[], None]
    ) -> None:
        self._group = group
        self._clock = group.clock
        self._journal = journal
        self._check_open = check_open
        self.busy: dict[WorkerHandle, Future[Outcome]] = {}
        """Workers that had not returned when the driver stopped waiting for their call."""
        self.entering: list[WorkerHandle] = []

    def ask_progress(self) -> dict[WorkerHandle, Progress]:
        """Return the progress of the members that answer while they are busy."""
        asked = {member: member.control("progress") for member in self._group.members}
        self._clock.wait(asked.values(), ANSWER_S)
        return {m: f.result() for m, f in asked.items() if f.done() and f.exception() is None}

    def pause_at(self, step: int | None) -> list[Future[int]]:
        """Send all members the step at which to pause. Return their answers."""
        number = self._journal.generation
        answers = [m.control("pause_at", number, step) for m in self._group.members]
        self._clock.wait(answers, ANSWER_S)
        return answers

    def interrupt(self, besides: Iterable[WorkerHandle] = ()) -> None:
        """Make the running calls fail on all members, because each may wait for any other."""
        members = dict.fromkeys([*self._group.members, *self.entering])
        concerned = [member for member in members if member not in besides]
        answers = [m.control("interrupt", self._journal.generation) for m in concerned]
        self._clock.wait(answers, ANSWER_S)

    def stop(self, attempt: Attempt) -> None:
        attempt.find_cause(self.interrupt)
        self.busy |= attempt.pending

    def finish(self, request: Request) -> None:
        """Interrupt all members, and send a request to the idle ones."""
        self.interrupt(besides=self.busy)  # the busy ones were interrupted before
        idle = [member for member in self._group.members if member not in self.busy]
        packed = sendable(request.name, request)
        attempt = Attempt({m: m.work("call", packed) for m in idle}, self._clock)
        attempt.settle_until(ANSWER_S, lambda: False)
        self.busy |= attempt.pending  # the next call detects lost workers among them

    def ask(
        self, members: Sequence[WorkerHandle], request: Request, timeout_s: float = _SALVAGE_S
    ) -> list[Outcome]:
        """Send a request to idle members. Return the outcomes of those that answer."""
        packed = pack(request)
        asked = [member.work("call", packed) for member in members]
        self._clock.wait(asked, timeout_s)
        return [future.result() for future in asked if _error_of(future) is None]

    def ask_all(self, members: Sequence[WorkerHandle], request: Request) -> list[Any]:
        """Return the answers of idle members.

        Return an empty list if any answer is missing or None.
        """
        given = [value_of(outcome) for outcome in self.ask(members, request)]
        return given if len(given) == len(members) and None not in given else []

    def reach(
        self, members: Iterable[WorkerHandle]
    ) -> tuple[dict[WorkerHandle, Progress], dict[WorkerHandle, BaseException]]:
        """Return the progress of workers, and the lost workers. Kill workers that do not answer."""
        asked = {member: member.control("progress") for member in members}
        deadline = self._clock.monotonic() + _SILENCE_S
        while True:
            self._clock.wait(asked.values(), _LOOK_EVERY_S)
            if self._group.is_cut_off():
                deadline = self._clock.monotonic() + _SILENCE_S
            # Ask again: Ray loses answers if its connection breaks, after 20 s without a network.
            again = [m for m, f in asked.items() if (e := _error_of(f)) and m.may_live(e)]
            is_done = not again and all(f.done() for f in asked.values())
            if is_done or self._clock.monotonic() >= deadline:
                break
            if again:
                self._clock.sleep(_ASK_AGAIN_S)
            asked |= {member: member.control("progress") for member in again}
            self._check_open()
        lost = {member: error for member, f in asked.items() if (error := _error_of(f))}
        for member, error in lost.items():
            if not is_loss(error):  # the process may still exist, but be stopped
                member.kill_process()
        return {m: f.result() for m, f in asked.items() if m not in lost}, lost


def value_of(outcome: Outcome) -> Any:
    """Return the value of a successful call, otherwise None."""
    return outcome.value() if outcome.kind == "ok" else None


def _error_of(answer: Future[Any]) -> BaseException | None:
    if answer.done():
        return answer.exception()
    return WorkerTimeoutError(f"no answer within {_SILENCE_S:g} s")
