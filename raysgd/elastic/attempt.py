"""One attempt at a call: the outcomes of the workers, and the cause of a failure."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import Empty
from typing import Any

from raysgd.cluster.clock import Clock
from raysgd.cluster.worker import Outcome
from raysgd.cluster.worker_handle import WorkerHandle, is_worker_failure
from raysgd.errors import CollectiveError


class Attempt:
    """Collects the outcomes of one call.

    A lost worker and the first error of user code are causes. A failed collective is not.
    """

    def __init__(self, futures: Mapping[WorkerHandle, Future[Outcome]], clock: Clock) -> None:
        self._clock = clock
        self.members: list[WorkerHandle] = []
        self.pending: dict[WorkerHandle, Future[Outcome]] = {}
        self._finished = clock.queue()
        for member, future in futures.items():
            self.add(member, future)
        self.outcomes: dict[WorkerHandle, Outcome] = {}
        self.lost: dict[WorkerHandle, BaseException] = {}
        self.first_user_error: tuple[WorkerHandle, Outcome] | None = None
        self.needs_new_group = False
        """Whether the workers must form a group again though none has failed."""
        self.connection_error: BaseException | None = None
        """The error of a worker that may live, but whose outcome will never come."""

    def add(self, member: WorkerHandle, future: Future[Outcome]) -> None:
        self.members.append(member)
        self.pending[member] = future
        future.add_done_callback(self._finished.put)

    @property
    def is_running(self) -> bool:
        return bool(self.pending) and not self.has_failed

    @property
    def has_failed(self) -> bool:
        kinds = {outcome.kind for outcome in self.outcomes.values()}
        return bool(self.lost) or self.needs_new_group or not kinds <= {"ok", "paused"}

    @property
    def is_cause_known(self) -> bool:
        """Whether the attempt has a cause, or needs none."""
        return self.needs_new_group or bool(self.lost) or self.first_user_error is not None

    def collect(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for an outcome. Return whether one has arrived."""
        finished = []
        with contextlib.suppress(Empty):
            finished.append(self._finished.get(timeout=max(0.0, timeout_s)))
            while True:
                finished.append(self._finished.get_nowait())
        for member in [each for each, future in self.pending.items() if future in finished]:
            future = self.pending.pop(member)
            if (error := future.exception()) is None:
                outcome = self.outcomes[member] = future.result()
                if outcome.kind == "user" and self.first_user_error is None:
                    self.first_user_error = (member, outcome)
                elif outcome.kind == "cut off":
                    self.needs_new_group = True
            elif member.may_be_alive(error):
                self.connection_error, self.needs_new_group = error, True
            elif is_worker_failure(error):
                self.lost[member] = error
            else:
                raise error
        return bool(finished)

    def collect_until(
        self, timeout_s: float, is_reached: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait up to `timeout_s` seconds until all workers have returned or a condition holds."""
        deadline = self._clock.monotonic() + timeout_s
        while self.pending and not is_reached() and self._clock.monotonic() < deadline:
            self.collect(deadline - self._clock.monotonic())

    def make_error(self) -> BaseException:
        """Return the exception to raise for a failure without a lost worker."""
        if self.first_user_error is not None:
            return self.first_user_error[1].exception()
        reasons = (o.exception() for o in self.outcomes.values() if o.kind not in ("ok", "paused"))
        reason = next(reasons, self.connection_error)
        error = CollectiveError(
            f"All workers are alive, but could not communicate: {reason}. Check that all workers "
            "make the same backward passes and call the same collectives, in the same order."
        )
        error.__cause__ = reason
        return error


def results_of(asked: Mapping[WorkerHandle, Future[Any]]) -> dict[WorkerHandle, Any]:
    """Return the results of the calls that have succeeded."""
    return {m: f.result() for m, f in asked.items() if f.done() and f.exception() is None}
