"""The iterator that a training loop draws batches from, and where its steps are counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from raysgd.torch.components import Components
from raysgd.torch.loading import Source

__all__ = ["StepInterruptedError", "Steps"]

_NOTHING = object()


class StepInterruptedError(Exception):
    """Raised inside a loop when the driver asked the worker to stop."""


class Steps:
    """Yields the batches of one stretch of training, and commits each step as the next begins.

    Asking for the next batch is what says that the step before is done; so loops that users
    write themselves are counted like the default one.

    Args:
        parts: where the steps are counted.
        source: where the batches come from.
        batches: its batches from ``parts.offset`` on.
        limit: the most batches of this stretch; None for the rest of the epoch.
        steps_left: steps from ``parts.offset`` to the end of the epoch; None where unknown.
        go_on: asks all ranks whether each of them has a batch; None where that is certain.
        on_commit: called after each step.
    """

    def __init__(
        self,
        parts: Components,
        source: Source,
        batches: Iterator[Any],
        limit: int | None,
        steps_left: int | None,
        go_on: Callable[[bool], bool] | None,
        on_commit: Callable[[], None] | None = None,
    ) -> None:
        self._parts = parts
        self._source = source
        self._batches = batches
        self._steps_left = steps_left
        self._limit = min((n for n in (limit, steps_left) if n is not None), default=None)
        self._go_on = go_on
        self._on_commit = on_commit
        self._start = parts.offset
        self._start_step = parts.global_step
        self._started = time.perf_counter()
        self._pause: int | None = None
        self._in_flight = _NOTHING
        self._exhausted = False
        self._timers = parts.timers if parts.timers.enabled else None
        self.stop_requested = False
        self.num_batches = 0
        self.loader_failed = False
        """Whether it was the loader that raised; it cannot be asked again then."""

    @property
    def step_s(self) -> float:
        """Mean seconds of a step so far; 0 before the first is done."""
        if not self.num_batches:
            return 0.0
        return (time.perf_counter() - self._started) / self.num_batches

    def pause_at(self, step: int | None) -> None:
        """Let the stretch end once `step` steps are committed. Called from another thread.

        None takes the request back.
        """
        held, asked = self._pause, None if step is None else step - self._start_step
        self._pause = asked if asked is None or held is None else min(asked, held)

    @property
    def total_batches(self) -> int | None:
        """Batches that this stretch will have; None where that is unknown."""
        return self._limit

    @property
    def epoch_is_over(self) -> bool:
        """Whether no batch of this epoch is left."""
        return self._exhausted or self.num_batches == self._steps_left

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> Any:
        if self._in_flight is not _NOTHING:
            self._commit()
        if self.stop_requested:
            raise StepInterruptedError("The driver asked this worker to stop.")
        if self._exhausted or self.num_batches == self._limit:
            raise StopIteration
        if self._pause is not None and self.num_batches >= self._pause:
            raise StopIteration
        batch = self._fetch() if self._timers is None else self._timed_fetch()
        if self._go_on is not None and not self._go_on(batch is not _NOTHING):
            batch = _NOTHING
        if batch is _NOTHING:
            self._exhausted = True
            raise StopIteration
        self._in_flight = batch
        return batch

    def finish(self) -> None:
        """Commit the last step, when the loop has returned, and note where the epoch stands."""
        if self._in_flight is not _NOTHING:
            self._commit()
        self._note_place()

    def fail(self) -> list[Any]:
        """Settle the step in flight when the loop has raised; return batches to train again.

        The step counts as done where every optimizer has made its update.
        """
        lost = [] if self._in_flight is _NOTHING or self._parts.updated else [self._in_flight]
        if lost:
            self._in_flight = _NOTHING
        self.finish()
        self._parts.roll_back()
        return lost

    def _note_place(self) -> None:
        self._parts.offset = self._source.offset_after(self._start, self.num_batches)

    def _fetch(self) -> Any:
        try:
            return next(self._batches, _NOTHING)
        except BaseException:
            self.loader_failed = True
            raise

    def _timed_fetch(self) -> Any:
        assert self._timers is not None
        with self._timers.record("data"):
            return self._fetch()

    def _commit(self) -> None:
        self._in_flight = _NOTHING
        self.num_batches += 1
        self._parts.commit()
        if self._on_commit is not None:
            self._note_place()
            self._on_commit()
