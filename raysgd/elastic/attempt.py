"""One attempt at a call on several workers: who has returned, who failed, and why."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import Empty

from raysgd.cluster.clock import Clock
from raysgd.cluster.worker import Outcome
from raysgd.cluster.worker_handle import WorkerHandle, is_loss
from raysgd.errors import CollectiveError

_ROOT_CAUSE_S = 0.5
"""Seconds to look for the cause of a failed collective before the other workers are interrupted."""
_OWN_STOP_S = 0.05
"""The same limit in seconds if the driver itself interrupts the workers."""
_RETURN_S = 0.7
"""Seconds that interrupted workers may take to return."""
_NODE_LOSS_S = 10.0
"""Seconds that Ray may take to report a lost node."""


class Attempt:
    """Collects the outcomes of one call.

    A lost worker and the first error of user code are causes. A failed collective is not.
    """

    def __init__(self, futures: Mapping[WorkerHandle, Future[Outcome]], clock: Clock) -> None:
        self._clock = clock
        self._pending = {future: member for member, future in futures.items()}
        self._done = clock.queue()
        for future in self._pending:
            future.add_done_callback(self._done.put)
        self.outcomes: dict[WorkerHandle, Outcome] = {}
        self.lost: dict[WorkerHandle, BaseException] = {}
        self.first_error: tuple[WorkerHandle, Outcome] | None = None
        self.interrupted_by_us = False
        """Whether the driver interrupted the workers though none had failed."""
        self.unanswered: BaseException | None = None
        """The error of a worker that may live, but whose outcome will never come."""

    @property
    def pending(self) -> dict[WorkerHandle, Future[Outcome]]:
        return {member: future for future, member in self._pending.items()}

    @property
    def under_way(self) -> bool:
        return bool(self._pending) and not self.failed

    @property
    def failed(self) -> bool:
        return bool(self.lost or self.unanswered) or any(
            o.kind not in ("ok", "paused") for o in self.outcomes.values()
        )

    @property
    def paused(self) -> bool:
        """Whether the workers have paused at the requested step."""
        return any(o.kind == "paused" for o in self.outcomes.values())

    @property
    def has_cause(self) -> bool:
        return bool(self.lost) or self.first_error is not None

    def settle(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for an outcome. Return whether one has arrived."""
        done = []
        with contextlib.suppress(Empty):
            done.append(self._done.get(timeout=max(0.0, timeout_s)))
            while True:
                done.append(self._done.get_nowait())
        for future in done:
            member = self._pending.pop(future, None)
            if member is None:
                continue  # declared lost before
            error = future.exception()
            if error is None:
                outcome = self.outcomes[member] = future.result()
                if outcome.kind == "user" and self.first_error is None:
                    self.first_error = (member, outcome)
                elif outcome.kind == "cut off":
                    self.interrupted_by_us = True
            elif member.may_live(error):
                self.unanswered, self.interrupted_by_us = error, True
            elif is_loss(error):
                self.lost[member] = error
            else:
                raise error
        return bool(done)

    def settle_until(self, timeout_s: float, is_reached: Callable[[], bool]) -> None:
        """Wait up to `timeout_s` seconds until all workers have returned or a condition holds."""
        deadline = self._clock.monotonic() + timeout_s
        while (
            self._pending and not is_reached() and (left := deadline - self._clock.monotonic()) > 0
        ):
            self.settle(left)

    def give_up(self, member: WorkerHandle, error: BaseException) -> None:
        """Declare a worker lost."""
        self._pending = {f: m for f, m in self._pending.items() if m is not member}
        self.lost[member] = error

    def find_cause(self, interrupt: Callable[[], None]) -> None:
        """Find the cause of a failure, and call `interrupt` to stop the other workers."""
        # The peers of a dead worker see a broken connection before Ray reports its death.
        reason_s = _OWN_STOP_S if self.interrupted_by_us else _ROOT_CAUSE_S
        self.settle_until(reason_s, lambda: self.has_cause)
        interrupt()
        self.settle_until(_RETURN_S, lambda: False)
        if not self.interrupted_by_us:
            self.settle_until(_NODE_LOSS_S, lambda: self.has_cause or self.interrupted_by_us)

    def error(self) -> BaseException:
        """Return the exception to raise for a failure without a lost worker."""
        if self.first_error is not None:
            return self.first_error[1].exception()
        stopped = ("communication", "stopped", "cut off")
        reasons = (o.exception() for o in self.outcomes.values() if o.kind in stopped)
        reason = next(reasons, self.unanswered)
        error = CollectiveError(f"All workers are alive, but could not communicate: {reason}")
        error.__cause__ = reason
        return error
