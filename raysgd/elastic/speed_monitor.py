"""Collect the seconds of each phase of training by worker."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raysgd._internal.progress import Progress
from raysgd._internal.step_timing import PHASES, SAVE, Totals
from raysgd.cluster.actor_group import ActorGroup
from raysgd.cluster.worker_handle import WorkerHandle
from raysgd.elastic.speed import SpeedReport, WorkerSpeed, find_cause

_WINDOW_S = 1.0
_MIN_S, _MIN_STEPS = 3.0, 10
"""Training that is too short for a sentence."""

PhaseTimes = NDArray[np.float64]
"""A row for each worker: the seconds of each phase, and these two numbers."""
_STEPS, _SAMPLES = len(PHASES), len(PHASES) + 1


@dataclass(eq=False)
class SpeedMonitor:
    """Collects the times of the workers. The measurement begins again when the group changes.

    A cause of slowness counts if it is the cause in most windows of a second.
    """

    group: ActorGroup
    _timing: dict[WorkerHandle, Totals] = field(default_factory=dict)
    _newest: dict[WorkerHandle, PhaseTimes] = field(default_factory=dict)
    _began: dict[WorkerHandle, PhaseTimes] = field(default_factory=dict)  # of the group, by rank
    _window: dict[WorkerHandle, PhaseTimes] = field(default_factory=dict)  # its begin, by rank
    _causes: Counter[tuple[str, int | None] | None] = field(default_factory=Counter)
    """Numbers of windows by their phase and rank, or None for a window that is not slow."""
    _links: dict[tuple[str, str], float] = field(default_factory=dict)  # bytes/s by hosts
    _laps: dict[str, dict[WorkerHandle, PhaseTimes]] = field(default_factory=dict)
    _step: int = 0  # the newest that workers have reported
    _saved_s: float = 0.0
    _is_saving: bool = False

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Count the time in the context as the wait of all workers for a checkpoint."""
        began, is_outer, self._is_saving = time.perf_counter(), not self._is_saving, True
        try:
            yield
        finally:
            if is_outer:
                self._is_saving = False
                self._saved_s += time.perf_counter() - began

    def observe(self, progress: Mapping[WorkerHandle, Progress]) -> None:
        members = list(self.group.members)
        measured = {member: each.measured for member, each in progress.items()}
        timings = {m: t for m in members if m in measured and (t := measured[m].timing) is not None}
        if not members or len(timings) < len(members):
            return
        self._step = max(each.position.global_step for each in progress.values())
        for member, each in measured.items():
            self._links |= {(member.info.node_ip, host): rate for host, rate in each.links.items()}
        if members != list(self._began):
            self._links.clear()
            new = self._times_of(Totals())
            self._began = self._window = {m: self._newest.get(m, new) for m in members}
            self._causes.clear()
        self._timing = timings
        self._newest = {member: self._times_of(each) for member, each in timings.items()}
        rows = self._times_since(self._window)
        if _seconds(rows) >= _WINDOW_S and _has_steps(rows):
            cause = find_cause(self._speeds(rows), 0, self._links)
            self._causes[None if cause is None else cause[:2]] += 1
            self._window = self._newest

    def _times_of(self, totals: Totals) -> PhaseTimes:
        row = np.array([*totals.seconds, totals.num_steps, totals.num_samples])
        row[SAVE] += self._saved_s
        return row

    def _times_since(self, began: Mapping[WorkerHandle, PhaseTimes]) -> PhaseTimes:
        return np.array([_difference(self._newest[member], row) for member, row in began.items()])

    def _speeds(self, rows: PhaseTimes) -> list[WorkerSpeed]:
        return [
            WorkerSpeed(
                rank=rank,
                host=member.info.node_ip,
                num_steps=int(row[_STEPS]),
                samples_per_s=float(row[_SAMPLES] / (row[:_STEPS].sum() or 1.0)),
                seconds=dict(zip(PHASES, (row / max(1, row[_STEPS])).tolist(), strict=False)),
                loader_workers=self._timing[member].loader_workers,
            )
            for rank, (member, row) in enumerate(zip(self._began, rows, strict=True))
        ]

    # ---- results

    def report(self) -> SpeedReport:
        rows = self._times_since(self._began)
        workers = self._speeds(rows)
        if not any(worker.num_steps for worker in workers):
            return SpeedReport()
        since = max(0, self._step - int(rows[:, _STEPS].max()))
        sentence = self._sentence(workers, since) if _seconds(rows) >= _MIN_S else ""
        return SpeedReport(workers=workers, since_step=since, sentence=sentence)

    def _sentence(self, workers: Sequence[WorkerSpeed], since_step: int) -> str:
        cause = find_cause(workers, since_step, self._links)
        if cause is None or any(each.num_steps < _MIN_STEPS for each in workers):
            return ""
        if cause.phase != "save" and self._causes[cause[:2]] < 0.6 * self._causes.total():
            return ""  # noise, or a few slow steps
        return cause.text

    def end_lap(
        self, kind: str, timing: Mapping[WorkerHandle, Totals] | None = None
    ) -> dict[str, list[float]]:
        """Return the mean seconds per step by phase and rank since the last lap of a kind.

        It ends at `timing`, or at the newest times.
        """
        newest = self._newest
        if timing is not None:
            newest = {member: self._times_of(each) for member, each in timing.items()}
        before, self._laps[kind] = self._laps.get(kind, {}), newest
        new = np.zeros(len(PHASES) + 2)
        rows = np.array([_difference(now, before.get(m, new)) for m, now in newest.items()])
        if not (rows.size and _has_steps(rows)):
            return {}
        names = [*(f"{name}_s" for name in PHASES), "samples_per_s"]
        seconds = rows[:, :_STEPS].sum(axis=1)
        rates = rows[:, _SAMPLES] / np.where(seconds, seconds, 1.0)  # 0 without measurements
        per_step = rows[:, :_STEPS] / rows[:, [_STEPS]]
        return dict(zip(names, [*per_step.T.tolist(), rates.tolist()], strict=True))


def _difference(new: PhaseTimes, old: PhaseTimes) -> PhaseTimes:
    return new if new[_STEPS] < old[_STEPS] else new - old  # the worker may have set up again


def _seconds(rows: PhaseTimes) -> float:
    return float(rows[:, :_STEPS].sum(axis=1).max())


def _has_steps(rows: PhaseTimes) -> bool:
    return bool(rows[:, _STEPS].all())
