"""Collect the seconds of each phase of training by worker, and record changes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raysgd._internal.context import Progress
from raysgd._internal.step_timing import PHASES, SAVE, WAIT, Totals
from raysgd.cluster.actor_group import ActorGroup
from raysgd.cluster.ray_metrics import export
from raysgd.cluster.worker_handle import WorkerHandle
from raysgd.elastic.journal import Journal
from raysgd.elastic.speed import SpeedReport, WorkerSpeed, find_cause

_WINDOW_S = 1.0
_MOST_WINDOWS = 512
_LEAST_S, _LEAST_STEPS = 3.0, 10
"""Training that is too short for a sentence."""
_LASTS_S = 10.0
"""Seconds that a phase must be slow before it is an event."""
_FACTOR, _LEAST_SHARE, _LEAST_EXTRA_S = 1.5, 0.1, 0.001
"""How much slower a phase must be: a factor, a share of the step, and seconds per step."""

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
    """Collects the times of the workers.

    The measurement begins again when the group changes, and when a phase becomes slow or recovers.
    """

    group: ActorGroup
    journal: Journal
    _timing: dict[WorkerHandle, Totals] = field(default_factory=dict)
    _newest: dict[WorkerHandle, Rows] = field(default_factory=dict)
    _began: dict[WorkerHandle, Rows] = field(default_factory=dict)  # of the open window, by rank
    _windows: list[_Window] = field(default_factory=list)
    _links: dict[WorkerHandle, Mapping[str, float]] = field(default_factory=dict)
    _laps: dict[str, dict[WorkerHandle, Rows]] = field(default_factory=dict)
    _slow: dict[int, Mapping[int, float]] = field(default_factory=dict)
    """The slow phases, with their usual seconds per step by rank."""
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
            self._windows, self._slow, self._links = [], {}, {}
            new = self._row(Totals())
            self._began = {member: self._newest.get(member, new) for member in members}
        self._timing = timings
        self._newest = {member: self._row(each) for member, each in timings.items()}
        window = self._open_window()
        if window.seconds < _WINDOW_S or not window.has_steps:
            return
        self._windows.append(window)
        self._began = self._newest
        self._look_for_change()
        if len(self._windows) > _MOST_WINDOWS:
            pairs = [self._windows[i : i + 2] for i in range(0, len(self._windows), 2)]
            self._windows = [_Window(pair[0].step, _summed(pair)) for pair in pairs]
        if all(member.remote for member in members):
            self._export(self._speeds(window.rows))

    def _export(self, speeds: Sequence[WorkerSpeed]) -> None:
        seconds = [(s, each.rank, name) for each in speeds for name, s in each.seconds.items()]
        export("raysgd_phase_seconds", "Mean seconds per step", ("rank", "phase"), seconds)
        rates = [(each.samples_per_s, each.rank) for each in speeds]
        export("raysgd_samples_per_second", "Samples per second", ("rank",), rates)

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

    def lap(self, kind: str) -> dict[str, list[float]]:
        """Return the mean seconds per step by phase and rank since the last lap of a kind."""
        before, self._laps[kind] = self._laps.get(kind, {}), self._newest
        new = np.zeros(len(PHASES) + 2)
        rows = np.array([_difference(now, before.get(m, new)) for m, now in self._newest.items()])
        if not rows.size or not (window := _Window(0, rows)).has_steps:
            return {}
        names = [*(f"{name}_s" for name in PHASES), "samples_per_s"]
        seconds = rows[:, :_STEPS].sum(axis=1)
        rates = rows[:, _SAMPLES] / np.where(seconds, seconds, 1.0)  # 0 without measurements
        return dict(zip(names, [*window.per_step.T.tolist(), rates.tolist()], strict=True))

    # ---- changes

    def _look_for_change(self) -> None:
        num_recent, seconds = 0, 0.0
        # A single step that takes long is not slow training.
        while (seconds < _LASTS_S or num_recent < 3) and num_recent < len(self._windows):
            num_recent += 1
            seconds += self._windows[-num_recent].seconds
        before, recent = self._windows[:-num_recent], self._windows[-num_recent:]
        if seconds < _LASTS_S:
            return
        is_known = sum(window.seconds for window in before[3:]) >= 2 * _LASTS_S
        if is_known and (slow := _slow_phase(before[:: 1 + len(before) // 64], recent)):
            self._record("slow", recent, *slow)
            self._slow.setdefault(*slow)
        for phase, usual in list(self._slow.items()):
            limits = _limit(np.array([*usual.values()]))
            if all((w.per_step[[*usual], phase] <= limits).all() for w in recent):
                self._record("recovered", recent, phase, usual)
                del self._slow[phase]

    def _record(
        self,
        kind: Literal["slow", "recovered"],
        recent: list[_Window],
        phase: int,
        usual: Mapping[int, float],
    ) -> None:
        self._windows = recent
        members, ranks = list(self._began), list(usual)
        now_s = np.mean([window.per_step[ranks, phase] for window in recent])
        usual_s = np.mean([*usual.values()])
        self.journal.record(
            kind,
            [members[rank] for rank in ranks],
            cause=f"{PHASES[phase]} takes {1000 * now_s:.1f} ms per step, and usually "
            f"{1000 * usual_s:.1f} ms",
            step=recent[0].step,
        )


def _slow_phase(
    before: Sequence[_Window], recent: Sequence[_Window]
) -> tuple[int, Mapping[int, float]] | None:
    """Return the phase that is slow in all recent windows, with its usual seconds by rank."""
    usual_s = np.median([window.per_step for window in before], axis=0)
    step_s = np.median([window.per_step.sum(axis=1) for window in before], axis=0)
    now_s = np.min([window.per_step for window in recent], axis=0)
    is_slow = now_s > _limit(usual_s, step_s[:, None])
    extra_s = np.where(is_slow, now_s - usual_s, 0.0).max(axis=0)
    if np.count_nonzero(extra_s) > 1:
        extra_s[WAIT] = 0.0  # the other workers wait for a slow one
    phase = int(extra_s.argmax())
    if not extra_s[phase]:
        return None
    return phase, {int(r): usual_s[r, phase] for r in np.flatnonzero(is_slow[:, phase])}


def _limit(usual_s: Rows, step_s: Rows | float = 0.0) -> Rows:
    least_s = np.maximum(_LEAST_EXTRA_S, _LEAST_SHARE * step_s)
    return np.maximum(_FACTOR * usual_s, usual_s + least_s)


def _difference(new: Rows, old: Rows) -> Rows:
    return new if new[_STEPS] < old[_STEPS] else new - old  # the worker may have set up again


def _summed(windows: Sequence[_Window]) -> Rows:
    rows: Rows = np.sum([window.rows for window in windows], axis=0)
    return rows
