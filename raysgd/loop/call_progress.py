"""The progress of a call on one worker, and its metrics so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from raysgd.loop.train_state import TrainState
from raysgd.metrics import merge_segments


@dataclass
class CallState:
    """What a worker that joins a call must know about it."""

    number: int = -1
    began_at: int = 0  # step
    more_epochs: int = 0  # in addition to the goal, because the call began at the end of an epoch
    scheduled: int = -1  # the newest call that stepped the schedulers with a metric
    validation: tuple[int, int] | None = None  # the newest call of ``validate``, and its offset


class CallProgress:
    """The newest call, and the metrics of its segments."""

    def __init__(self, train_state: TrainState) -> None:
        self._train_state = train_state
        self.state = CallState()
        # Start step and metrics of each segment.
        self.results: list[tuple[int, Mapping[str, Any]]] = []

    def begin(self, number: int) -> None:
        step = self._train_state.global_step
        self.state = replace(self.state, number=number, began_at=step, more_epochs=0)
        self.results = []
        self._train_state.timers.reset()

    def join(self, state: Mapping[str, Any]) -> None:
        """Join a call that other workers have begun, without their metrics."""
        if self.state.number != state["number"]:
            self.results = []
        self.state = CallState(**state)

    def result(self) -> dict[str, Any]:
        """Return the merged metrics of the segments."""
        result = merge_segments([metrics for _, metrics in self.results])
        timers = self._train_state.timers
        return {**result, "profile": timers.stats()} if timers.enabled else result
