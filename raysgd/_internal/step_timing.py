"""Measure the seconds of each phase of training on one worker, since its first step."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from time import perf_counter
from typing import NamedTuple

PHASES = ("data", "copy", "forward", "backward", "wait", "optimizer", "save", "other")
"""Names of the phases of a step. ``wait`` is the wait for other workers within any phase."""
DATA, COPY, FORWARD, BACKWARD, WAIT, OPTIMIZER, SAVE, OTHER = range(len(PHASES))
_OUTSIDE = -1  # not within a call of ``train``


class Totals(NamedTuple):
    """What a worker has measured since it started."""

    seconds: tuple[float, ...] = (0.0,) * len(PHASES)
    num_steps: int = 0
    num_samples: float = 0
    loader_workers: int | None = None  # ``num_workers`` of the train loader, if it has any


class StepTiming:
    """A stopwatch that is always in one phase. It costs about 0.2 µs for each change of the phase.

    Only the thread that trains changes the phase. Other threads may read the totals.
    """

    def __init__(self) -> None:
        self.phase = _OUTSIDE
        self.batch_phase = FORWARD
        """Phase of ``train_batch`` outside of the known parts."""
        self.num_steps = 0
        self.num_samples: float = 0
        self.loader_workers: int | None = None
        self._seconds = [0.0] * len(PHASES)
        self._since = perf_counter()
        self.thread: int | None = None

    def enter(self, phase: int) -> int:
        """Start a phase, and return the phase that it ends."""
        before = self.phase
        if before != phase and before != _OUTSIDE:
            now = perf_counter()
            self._seconds[before] += now - self._since
            self._since, self.phase = now, phase
        return before

    @contextlib.contextmanager
    def within(self, phase: int) -> Iterator[None]:
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Measure a call of ``train`` in this thread."""
        global _active
        before, _active = _active, self
        self.thread = threading.get_ident()
        self._since, self.phase = perf_counter(), OTHER
        try:
            yield
        finally:
            self.enter(_OUTSIDE)
            _active = before

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Measure nothing in the context."""
        before = self.enter(_OUTSIDE)
        try:
            yield
        finally:
            self._since, self.phase = perf_counter(), before

    @property
    def totals(self) -> Totals:
        return Totals(tuple(self._seconds), self.num_steps, self.num_samples, self.loader_workers)


class _Off(StepTiming):
    """Measures nothing, to find out what measuring costs."""

    def enter(self, phase: int) -> int:
        return _OUTSIDE


_active: StepTiming | None = None
"""The timing of the call that runs in this process."""


def new_timing(kind: type[StepTiming] = StepTiming) -> StepTiming:
    return _Off() if os.environ.get("RAYSGD_STEP_TIMING") == "0" else kind()


def enter(phase: int, any_thread: bool = False) -> int | None:
    """Start a phase of the running call. Return the phase that it ends, or None for no change.

    Ignore other threads than the one that trains. A backward pass of a GPU may use `any_thread`.
    """
    timing = _active
    if timing is None or timing.phase == phase:
        return None
    if not any_thread and timing.thread != threading.get_ident():
        return None
    return timing.enter(phase)


def resume(phase: int | None) -> None:
    """Return to the phase that `enter` has ended."""
    if phase is not None and _active is not None:
        _active.enter(phase)
