"""Collect the seconds of each phase of training by worker."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raysgd._internal.context import Progress
from raysgd._internal.step_timing import PHASES, SAVE, Totals
from raysgd.cluster.actor_group import ActorGroup
from raysgd.cluster.worker_handle import WorkerHandle
from raysgd.elastic.speed import SpeedReport, WorkerSpeed, find_cause

_WINDOW_S = 1.0
_MOST_WINDOWS = 512
_LEAST_S, _LEAST_STEPS = 3.0, 10
"""Training that is too short for a sentence."""

Rows = NDArray[np.float64]
"""A row for each worker: the seconds of each phase, and these two numbers."""
_STEPS, _SAMPLES = len(PHASES), len(PHASES) + 1


class _Window(NamedTuple):
    """What the workers have measured in about a second."""

    step: int  # committed steps at its start
    rows: Rows

    @property
    def seconds(self) -> float:
        return float(self.rows[:, :_STEPS].sum(axis=1).max())

    @property
    def has_steps(self) -> bool:
        return bool(self.rows[:, _STEPS].all())

    @property
    def per_step(self) -> Rows:
        """Seconds per step by rank and phase."""
        return self.rows[:, :_STEPS] / self.rows[:, [_STEPS]]


@dataclass(eq=False)
class SpeedMonitor:
    """Collects the times of the workers. The measurement begins again when the group changes."""

    group: ActorGroup
    _timing: dict[WorkerHandle, Totals] = field(default_factory=dict)
    _newest: dict[WorkerHandle, Rows] = field(default_factory=dict)
    _began: dict[WorkerHandle, Rows] = field(default_factory=dict)  # of the open window, by rank
    _windows: list[_Window] = field(default_factory=list)
    _links: dict[WorkerHandle, Mapping[str, float]] = field(default_factory=dict)
    _laps: dict[str, dict[WorkerHandle, Rows]] = field(default_factory=dict)
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

    def poll(self, progress: Mapping[WorkerHandle, Progress]) -> None:
        members = list(self.group.members)
        timings = {m: p.timing for m in members if (p := progress.get(m)) and p.timing is not None}
        if not members or len(timings) < len(members):
            return
        self._step = max(each.global_step for each in progress.values())
        self._links |= {m: p.links for m, p in progress.items() if p.links}
        if members != list(self._began):
            self._windows, self._links = [], {}
            new = self._row(Totals())
            self._began = {member: self._newest.get(member, new) for member in members}
        self._timing = timings
        self._newest = {member: self._row(each) for member, each in timings.items()}
        window = self._open_window()
        if window.seconds < _WINDOW_S or not window.has_steps:
            return
        self._windows.append(window)
        self._began = self._newest
        if len(self._windows) > _MOST_WINDOWS:
            pairs = [self._windows[i : i + 2] for i in range(0, len(self._windows), 2)]
            self._windows = [_Window(pair[0].step, _summed(pair)) for pair in pairs]

    def _row(self, totals: Totals) -> Rows:
        row = np.array([*totals.seconds, totals.num_steps, totals.num_samples])
        row[SAVE] += self._saved_s
        return row

    def _open_window(self) -> _Window:
        rows = np.array([_difference(self._newest[m], began) for m, began in self._began.items()])
        return _Window(max(0, self._step - int(rows[:, _STEPS].max())), rows)

    def _speeds(self, rows: Rows) -> list[WorkerSpeed]:
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
        if not self._newest:
            return SpeedReport()
        windows = [*self._windows, self._open_window()]
        workers = self._speeds(_summed(windows))
        if not any(worker.num_steps for worker in workers):
            return SpeedReport()
        sentence = self._sentence(windows, workers)
        return SpeedReport(workers=workers, since_step=windows[0].step, sentence=sentence)

    def _sentence(self, windows: Sequence[_Window], workers: Sequence[WorkerSpeed]) -> str:
        whole = [each for each in windows if each.has_steps]
        is_short = any(each.num_steps < _LEAST_STEPS for each in workers)
        if is_short or sum(window.seconds for window in windows) < _LEAST_S:
            return ""
        links = {
            (member.info.node_ip, host): rate
            for member, rates in self._links.items()
            for host, rate in rates.items()
        }
        cause = find_cause(workers, windows[0].step, links)
        if cause is None:
            return ""
        again = [find_cause(self._speeds(window.rows), 0, links) for window in whole]
        num_same = sum(each is not None and each[:2] == cause[:2] for each in again)
        if cause.phase != "save" and num_same < 0.6 * len(whole):
            return ""  # noise, or a few slow steps
        return cause.text

    def lap(
        self, kind: str, timing: Mapping[WorkerHandle, Totals] | None = None
    ) -> dict[str, list[float]]:
        """Return the mean seconds per step by phase and rank since the last lap of a kind.

        It ends at `timing`, or at the newest times.
        """
        newest = self._newest if timing is None else {m: self._row(t) for m, t in timing.items()}
        before, self._laps[kind] = self._laps.get(kind, {}), newest
        new = np.zeros(len(PHASES) + 2)
        rows = np.array([_difference(now, before.get(m, new)) for m, now in newest.items()])
        if not rows.size or not (window := _Window(0, rows)).has_steps:
            return {}
        names = [*(f"{name}_s" for name in PHASES), "samples_per_s"]
        seconds = rows[:, :_STEPS].sum(axis=1)
        rates = rows[:, _SAMPLES] / np.where(seconds, seconds, 1.0)  # 0 without measurements
        return dict(zip(names, [*window.per_step.T.tolist(), rates.tolist()], strict=True))


def _difference(new: Rows, old: Rows) -> Rows:
    return new if new[_STEPS] < old[_STEPS] else new - old  # the worker may have set up again


def _summed(windows: Sequence[_Window]) -> Rows:
    rows: Rows = np.sum([window.rows for window in windows], axis=0)
    return rows
