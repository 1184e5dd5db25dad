"""Measure the seconds of each phase of training on one worker, since its first step."""

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, NamedTuple

PHASES = ("data", "copy", "forward", "backward", "wait", "optimizer", "save", "other")
"""Names of the phases of a step. ``wait`` is the wait for other workers within any phase."""
DATA, COPY, FORWARD, BACKWARD, WAIT, OPTIMIZER, SAVE, OTHER = range(len(PHASES))
_OUTSIDE = -1  # not within a call of ``train``
_EVERY_S = 0.05
"""Seconds between two steps with events of a GPU, because those of a step take about 50 µs."""
_MAX_UNREAD = 64


class PhaseTotals(NamedTuple):
    """What a worker has measured since it started."""

    phase_s: tuple[float, ...] = (0.0,) * len(PHASES)
    num_steps: int = 0
    num_samples: float = 0
    num_loader_workers: int | None = None  # ``num_workers`` of the train loader, if it has any


class DeviceTiming:
    """Divides the time by how long a GPU takes from one event to the next, in some of the steps.

    The GPU computes between two events, or waits for its host, for example for data. Only `other`
    has the time of the host: code of the user that waits for the GPU, such as ``.item()``, blocks
    the host. Nothing here waits for the GPU.
    """

    def __init__(self, new_event: Callable[[], Any]) -> None:
        self._new_event = new_event
        self.phase_s = self._until = (0.0,) * len(PHASES)  # and the host's seconds that they cover
        self._events: list[tuple[int, Any]] | None = None  # of the step in progress, if measured
        self._measured_at = 0.0
        self._unread: deque[tuple[list[tuple[int, Any]], tuple[float, ...]]] = deque(
            maxlen=_MAX_UNREAD
        )
        """The events at which the phases of each step began, and the host's seconds at its end."""

    def begin(self, phase: int, now: float, host_s: list[float]) -> None:
        """Start a phase at the time `now`, when the host has taken `host_s` for each phase."""
        if phase == _OUTSIDE:  # a call ends, maybe because the GPU failed
            self._events = None
        if phase == DATA:
            if self._events is not None:
                self._record(DATA)
                self._unread.append((self._events, tuple(host_s)))
                self._events = None
            while self._unread and self._unread[0][0][-1][1].query():
                self._divide(*self._unread.popleft())
            if now - self._measured_at >= _EVERY_S:
                self._measured_at, self._events = now, []
        if self._events is not None:
            self._record(phase)

    def _record(self, phase: int) -> None:
        assert self._events is not None
        event = self._new_event()
        event.record()
        self._events.append((phase, event))

    def _divide(self, events: list[tuple[int, Any]], until: tuple[float, ...]) -> None:
        device_s = [0.0] * len(PHASES)
        for (phase, event), (_, following) in itertools.pairwise(events):
            device_s[phase] += event.elapsed_time(following) / 1000
        host_s = [now - before for now, before in zip(until, self._until, strict=True)]
        self._until = until
        device_s[OTHER] = device_s[SAVE] = 0.0
        rest_s = sum(host_s) - host_s[OTHER] - host_s[SAVE]
        factor = rest_s / (sum(device_s) or 1.0)
        divided = [before + factor * s for before, s in zip(self.phase_s, device_s, strict=True)]
        divided[OTHER] += host_s[OTHER]
        divided[SAVE] += host_s[SAVE]
        self.phase_s = tuple(divided)  # in one step, because other threads read it


class StepTiming:
    """A stopwatch that is always in one phase. It costs about 0.2 µs for each change of the phase.

    Only the thread that trains changes the phase. Other threads may read the totals. On a GPU,
    `new_event` makes its events, because the host does not wait for it.
    """

    def __init__(self, new_event: Callable[[], Any] | None = None) -> None:
        self._device = None if new_event is None else DeviceTiming(new_event)
        self.phase = _OUTSIDE
        self.batch_phase = FORWARD
        """Phase of ``train_batch`` outside of the known phases."""
        self.num_steps = 0
        self.num_samples: float = 0
        self.num_loader_workers: int | None = None
        self._phase_s = [0.0] * len(PHASES)
        self._since = perf_counter()
        self.thread: int | None = None

    def begin(self, phase: int) -> int:
        """Start a phase, and return the phase that it ends."""
        before = self.phase
        if before != phase and before != _OUTSIDE:
            now = perf_counter()
            self._phase_s[before] += now - self._since
            self._since, self.phase = now, phase
            if self._device is not None:
                self._device.begin(phase, now, self._phase_s)
        return before

    @contextlib.contextmanager
    def within(self, phase: int) -> Iterator[None]:
        before = self.begin(phase)
        try:
            yield
        finally:
            self.begin(before)

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
            self.begin(_OUTSIDE)
            _active = before

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Measure nothing in the context."""
        before = self.begin(_OUTSIDE)
        try:
            yield
        finally:
            self._since, self.phase = perf_counter(), before

    @property
    def totals(self) -> PhaseTotals:
        phase_s = tuple(self._phase_s) if self._device is None else self._device.phase_s
        return PhaseTotals(phase_s, self.num_steps, self.num_samples, self.num_loader_workers)


_active: StepTiming | None = None
"""The timing of the call that runs in this process."""


def begin_phase(phase: int, any_thread: bool = False) -> int | None:
    """Start a phase of the running call. Return the phase that it ends, or None for no change.

    Ignore other threads than the one that trains. A backward pass of a GPU may use `any_thread`.
    """
    if (timing := _active) is None or timing.phase == phase:
        return None
    if not any_thread and timing.thread != threading.get_ident():
        return None
    return timing.begin(phase)


def resume_phase(phase: int | None) -> None:
    """Return to the phase that `begin_phase` has ended."""
    if phase is not None and _active is not None:
        _active.begin(phase)
