"""The progress of a call on one worker, and its metrics so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
    shared: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    """Start step and metrics of segments whose metrics each worker has. Rank 0 returns them."""


class CallProgress:
    """The newest call, and the metrics of its segments."""

    def __init__(self, train_state: TrainState) -> None:
        self._train_state = train_state
        self.state = CallState()
        # Start step and metrics of this worker's segments, without the shared metrics.
        self.results: list[tuple[int, Mapping[str, Any]]] = []

    def begin(self, number: int) -> None:
        step = self._train_state.global_step
        self.state = replace(self.state, number=number, began_at=step, more_epochs=0)
        self.clear()
        self._train_state.timers.reset()

    def clear(self) -> None:
        """Discard all metrics."""
        self.results, self.state.shared = [], []

    def add(self, start: int, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of a segment that has ended, also by an error."""
        (self.state.shared if self._is_shared else self.results).append((start, metrics))

    @property
    def _is_shared(self) -> bool:
        return self._train_state.gathers_metrics and self._train_state.meters is not None

    def saved(self) -> dict[str, Any]:
        """Return the state, with the shared metrics of a segment that runs."""
        state, train_state, shared = vars(self.state), self._train_state, self.state.shared
        if train_state.segment is None or train_state.meters is None or not self._is_shared:
            return state
        running = train_state.segment.start_step, train_state.meters.summary()
        return {**state, "shared": [*shared, running]}

    def join(self, state: Mapping[str, Any]) -> None:
        """Join a call that other workers have begun, without their metrics."""
        if self.state.number != state["number"]:
            self.results = []
        self.state = CallState(**{**state, "shared": [*state["shared"]]})

    @property
    def segments(self) -> list[tuple[int, Mapping[str, Any]]]:
        """Start step and metrics of the segments that this worker returns."""
        return self.results + self.state.shared * (self._train_state.context.world_rank == 0)

    def result(self, is_leaving: bool = False) -> dict[str, Any]:
        """Return the merged metrics. The others have the shared metrics of a leaving worker."""
        segments = self.results if is_leaving else self.segments
        result = merge_segments([metrics for _, metrics in segments])
        timers = self._train_state.timers
        return {**result, "profile": timers.stats()} if timers.enabled else result
