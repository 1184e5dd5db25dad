"""The metrics that a worker records of a call."""

import contextlib
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from raysgd._internal.step_timing import BACKWARD, DATA, FORWARD, OPTIMIZER
from raysgd._internal.worker_status import LogPoint
from raysgd.cluster.serialization import pack
from raysgd.loop.train_state import TrainState, WorkerCall
from raysgd.metrics import AverageMeterCollection, merge_segment_metrics

_PROFILED = {"data": DATA, "fwd": FORWARD, "grad": BACKWARD, "apply": OPTIMIZER}
"""Phases in ``profile``, by the names of their timers in RaySGD v1."""
_METRICS_WAIT_S = 0.02
"""Seconds to wait for metrics from a GPU before reporting earlier ones."""


class MetricsRecorder:
    """Records the metrics of the segments of the newest call."""

    def __init__(self, train_state: TrainState) -> None:
        self._train_state = train_state
        self._totals_before = self._totals_at_point = train_state.step_timing.totals
        # Start step and metrics of this worker's segments, without merged metrics.
        self.own_metrics: list[tuple[int, Mapping[str, Any]]] = []
        self._points: deque[LogPoint] = deque()  # another thread calls `unacknowledged_log_points`

    def begin(self, call_number: int) -> None:
        train_state, old = self._train_state, self._train_state.call
        train_state.call = WorkerCall(call_number, old.start_step, old.scheduler_call)
        self.clear()
        self._points.clear()
        train_state.timers.reset()
        self._totals_before = self._totals_at_point = train_state.step_timing.totals

    def clear(self) -> None:
        """Discard all metrics."""
        self.own_metrics, self._train_state.call.merged_metrics = [], []

    def add_segment(self, start_step: int, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of a segment that has ended, also by an error."""
        recorded = self._train_state.call.merged_metrics if self.is_merged else self.own_metrics
        recorded.append((start_step, metrics))

    @property
    def is_merged(self) -> bool:
        """Whether each worker has the metrics of all workers."""
        return any(feature.gathers_metrics for feature in self._train_state.features)

    def export_call(self) -> dict[str, Any]:
        """Return the call, with the merged metrics of a segment that runs."""
        call, segment = self._train_state.call, self._train_state.segment
        merged, meters = [*call.merged_metrics], self._train_state.meters
        if segment is not None and meters is not None and self.is_merged:
            merged.append((segment.start_step, meters.summary()))
        return {**vars(call), "merged_metrics": merged}

    def continue_call(self, call: Mapping[str, Any]) -> None:
        """Continue a call that other workers have begun, without their metrics."""
        if self._train_state.call.call_number != call["call_number"]:
            self.own_metrics = []
        self._train_state.call = WorkerCall(**{**call, "merged_metrics": [*call["merged_metrics"]]})

    def _segment_metrics(self, is_leaving: bool, since: int = 0) -> list[Mapping[str, Any]]:
        """Return the metrics of segments that began at step `since` or later, for the driver."""
        train_state = self._train_state
        returns_merged = train_state.context.world_rank == 0 and not is_leaving
        recorded = self.own_metrics + train_state.call.merged_metrics * returns_merged
        return [metrics for start, metrics in recorded if start >= since]

    def add_log_point(self, is_leaving: bool = False) -> None:
        """Add what this worker has measured since the last point."""
        train_state, call = self._train_state, self._train_state.call
        metrics: Any = None
        if results := self._segment_metrics(is_leaving, since=call.last_log_step):
            optimizers, norms = train_state.optimizers, train_state.gradient_norms
            metrics = merge_segment_metrics(results) | optimizer_metrics(optimizers, norms)
            if not train_state.context.is_in_driver:
                metrics = pack(metrics)
        elif is_leaving:
            return
        timing, position = train_state.step_timing.totals, train_state.position
        call.last_log_step = position.global_step
        self._points.append(
            LogPoint(
                call_number=call.call_number,
                global_step=position.global_step,
                num_completed_epochs=position.epoch,
                in_epoch=position.offset > 0,
                metrics=metrics,
                timing=timing,
                seconds=sum(timing.phase_s) - sum(self._totals_at_point.phase_s),
                reaches_log_step=not is_leaving,
            )
        )
        self._totals_at_point = timing

    def unacknowledged_log_points(self, acknowledged_step: int) -> tuple[LogPoint, ...]:
        """Return the points after an acknowledged step, and drop the others."""
        while self._points and self._points[0].global_step <= acknowledged_step:
            self._points.popleft()
        return tuple(self._points)

    def result(self, is_leaving: bool = False) -> dict[str, Any]:
        """Return the metrics of the call. For a leaving worker, omit those that all others have."""
        result = merge_segment_metrics(self._segment_metrics(is_leaving))
        timers = self._train_state.timers
        before, now = self._totals_before, self._train_state.step_timing.totals
        num_steps = now.num_steps - before.num_steps
        means = {
            f"mean_{key}_s": (now.phase_s[phase] - before.phase_s[phase]) / num_steps
            for key, phase in (_PROFILED.items() if num_steps else ())
        }
        return {**result, "profile": means | timers.stats()} if timers.enabled else result


def optimizer_metrics(optimizers: Sequence[Any], norms: Mapping[int, Any]) -> dict[str, float]:
    """Return the learning rates under the names of `LearningRateMonitor`, and gradient norms."""
    rates, named_norms = {}, {}
    for number, optimizer in enumerate(optimizers):
        suffix = "" if len(optimizers) == 1 else f"-{number}"
        groups = getattr(optimizer, "param_groups", None) or [{"lr": optimizer.learning_rate}]
        for index, group in enumerate(groups):
            # In Keras with several workers, float() rejects the variable.
            rate = group["lr"].numpy() if hasattr(group["lr"], "assign") else group["lr"]
            rates[f"lr{suffix}/group{index}" if len(groups) > 1 else f"lr{suffix}"] = float(rate)
        if (norm := norms.get(id(optimizer))) is not None:
            named_norms[f"grad_norm{suffix}"] = float(norm)
    return rates | named_norms


class MetricReader:
    """Reads the newest metrics in a thread. `read` returns older metrics until that thread ends.

    Reading from a GPU waits for earlier work on the GPU, such as a collective with a lost worker.
    """

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._thread: threading.Thread | None = None

    def read(self, meters: AverageMeterCollection) -> dict[str, float]:
        thread = self._thread  # other control threads may read at the same time
        if thread is None or not thread.is_alive():
            thread = threading.Thread(target=self._wait, args=(meters,), daemon=True)
            thread.start()
            self._thread = thread
        thread.join(_METRICS_WAIT_S)
        return self._values

    def _wait(self, meters: AverageMeterCollection) -> None:
        with contextlib.suppress(Exception):  # the training thread raises GPU errors too
            self._values = meters.latest()
