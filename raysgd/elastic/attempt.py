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

__all__ = ["Attempt"]

_ROOT_CAUSE_S = 0.5
"""How long to look for the reason of a failed collective before the others are interrupted."""
_OWN_STOP_S = 0.05
"""The same where no worker has failed, and the driver stops them: for a pause that came too late,
say."""
_RETURN_S = 0.7
"""How long interrupted workers may take before the caller gets the exception without them."""
_NODE_LOSS_S = 10.0
"""How long Ray may take to notice that a node is gone, when all that is left of it is silence."""


class Attempt:
    """Collects the outcomes of one call.

    The first failure of user code in time is the reason of the others: whoever waits for that
    worker fails after it. A lost worker is a reason too. A failed collective is none.
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
        """Whether the workers were stopped though none had failed."""
        self.unanswered: BaseException | None = None
        """Why the outcome of a worker will never come that may live, and is to be asked again."""

    @property
    def pending(self) -> dict[WorkerHandle, Future[Outcome]]:
        """The workers that have not returned."""
        return {member: future for future, member in self._pending.items()}

    @property
    def under_way(self) -> bool:
        """Whether workers are busy and none has failed."""
        return bool(self._pending) and not self.failed

    @property
    def failed(self) -> bool:
        """Whether a worker has failed."""
        return bool(self.lost or self.unanswered) or any(
            o.kind not in ("ok", "paused") for o in self.outcomes.values()
        )

    @property
    def paused(self) -> bool:
        """Whether workers have stopped at the step at which they were asked to."""
        return any(o.kind == "paused" for o in self.outcomes.values())

    def settle(self, timeout_s: float) -> bool:
        """Wait until a worker returns, at most `timeout_s`, and note what it returned.

        Returns:
            Whether one has.
        """
        # in the order in which they came, and in a time that does not grow with those to come
        done = []
        with contextlib.suppress(Empty):
            done.append(self._done.get(timeout=max(0.0, timeout_s)))
            while True:
                done.append(self._done.get_nowait())
        for future in done:
            member = self._pending.pop(future, None)
            if member is None:
                continue  # given up before
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

    def give_up(self, member: WorkerHandle, error: BaseException) -> None:
        """Wait no longer for a worker: it counts as lost."""
        self._pending = {f: m for f, m in self._pending.items() if m is not member}
        self.lost[member] = error

    def find_cause(self, interrupt: Callable[[], None]) -> None:
        """Find the reason of a failure, and bring the other workers back by `interrupt`."""
        # the peers of a dead worker see a broken connection before Ray tells of its death
        reason_s = _OWN_STOP_S if self.interrupted_by_us else _ROOT_CAUSE_S
        self._settle_until(reason_s, lambda: self.has_cause)
        interrupt()
        self._settle_until(_RETURN_S, lambda: False)
        if not self.interrupted_by_us:
            self._settle_until(_NODE_LOSS_S, lambda: self.has_cause or self.interrupted_by_us)

    def _settle_until(self, timeout_s: float, reached: Callable[[], bool]) -> None:
        deadline = self._clock.monotonic() + timeout_s
        while self._pending and not reached() and (left := deadline - self._clock.monotonic()) > 0:
            self.settle(left)

    @property
    def has_cause(self) -> bool:
        """Whether a worker is lost, or its user's code has raised."""
        return bool(self.lost) or self.first_error is not None

    def error(self) -> BaseException:
        """Return the exception to raise for a failure that is no loss."""
        if self.first_error is not None:
            return self.first_error[1].exception()
        stopped = ("communication", "stopped", "cut off")
        reasons = (o.exception() for o in self.outcomes.values() if o.kind in stopped)
        reason = next(reasons, self.unanswered)
        error = CollectiveError(
            f"Workers could not communicate, though all of them are alive: {reason}"
        )
        error.__cause__ = reason
        return error
