"""Measure the phases of training on a GPU with events, because its host does not wait for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from raysgd._internal.step_timing import DATA, OTHER, PHASES, SAVE, StepTiming, Totals

_EVERY_S = 0.05
"""Seconds between two measured steps, because the events of a step take about 50 µs."""
_MOST_UNREAD = 64


class _Step(NamedTuple):
    """The events at which the phases of one step began, and the host's seconds at its end."""

    events: list[tuple[int, Any]]
    host: list[float]


class DeviceTiming(StepTiming):
    """Divides the time by how long a GPU takes from one event to the next, in some of the steps.

    The GPU computes between two events, or waits for its host, for example for data. Only `other`
    has the time of the host: code of the user that waits for the GPU, such as ``.item()``, blocks
    the host. Nothing here waits for the GPU.
    """

    def __init__(self, new_event: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self._new_event = new_event or (lambda: torch.cuda.Event(enable_timing=True))
        self._divided = [0.0] * len(PHASES)
        self._until = [0.0] * len(PHASES)  # the host's seconds that `_divided` covers
        self._events: list[tuple[int, Any]] | None = None  # of the step in progress, if measured
        self._measured_at = 0.0
        self._unread: deque[_Step] = deque(maxlen=_MOST_UNREAD)

    def enter(self, phase: int) -> int:
        before = super().enter(phase)
        if phase < 0:  # a call ends, maybe because the GPU failed
            self._events = None
        if phase == before or min(phase, before) < 0:
            return before
        if phase == DATA:
            self._end_step()
        if self._events is not None:
            self._record(phase)
        return before

    def _record(self, phase: int) -> None:
        assert self._events is not None
        event = self._new_event()
        event.record()
        self._events.append((phase, event))

    def _end_step(self) -> None:
        if self._events is not None:
            self._record(DATA)
            self._unread.append(_Step(self._events, list(self._seconds)))
            self._events = None
        while self._unread and self._unread[0].events[-1][1].query():
            self._divide(self._unread.popleft())
        if self._since - self._measured_at >= _EVERY_S:
            self._measured_at, self._events = self._since, []

    def _divide(self, step: _Step) -> None:
        device_s = [0.0] * len(PHASES)
        for (phase, event), (_, following) in zip(step.events, step.events[1:], strict=False):
            device_s[phase] += event.elapsed_time(following) / 1000
        host_s = [now - before for now, before in zip(step.host, self._until, strict=True)]
        self._until = step.host
        device_s[OTHER] = device_s[SAVE] = 0.0
        rest_s = sum(host_s) - host_s[OTHER] - host_s[SAVE]
        factor = rest_s / (sum(device_s) or 1.0)
        divided = [before + factor * s for before, s in zip(self._divided, device_s, strict=True)]
        divided[OTHER] += host_s[OTHER]
        divided[SAVE] += host_s[SAVE]
        self._divided = divided  # in one step, because other threads read it

    @property
    def totals(self) -> Totals:
        return super().totals._replace(seconds=tuple(self._divided))
