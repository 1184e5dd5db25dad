"""Collect the seconds of each phase of training by worker, and record changes."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from raysgd._internal.context import Progress
from raysgd._internal.step_timing import PHASES, SAVE, WAIT, Totals
from raysgd.cluster.actor_group import ActorGroup
from raysgd.cluster.ray_metrics import export
from raysgd.cluster.worker_handle import WorkerHandle
from raysgd.elastic.journal import Journal
from raysgd.elastic.speed import SpeedReport, WorkerSpeed, find_cause, speeds_of

_WINDOW_S = 1.0
_MOST_WINDOWS = 512
_LEAST_S, _LEAST_STEPS = 3.0, 10
"""Training that is too short for a sentence."""
_LASTS_S = 10.0
"""Seconds that a phase must be slow before it is an event."""
_FACTOR, _LEAST_SHARE, _LEAST_EXTRA_S = 1.5, 0.1, 0.001
"""How much slower a phase must be: a factor, a share of the step, and seconds per step."""


class _Window(NamedTuple):
    """What the workers have measured in about a second, by rank."""

    step: int  # committed steps at its start
    rows: Sequence[Totals]

    @property
    def seconds(self) -> float:
        return max(sum(row.seconds) for row in self.rows)

    @property
    def has_steps(self) -> bool:
        return all(row.num_steps for row in self.rows)

    def per_step(self, phase: int, rank: int) -> float:
        return self.rows[rank].seconds[phase] / self.rows[rank].num_steps


@dataclass(eq=False)
class SpeedMonitor:
    """Collects the times of the workers.

    The measurement begins again when the group changes, and when a phase becomes slow or recovers.
    """

    group: ActorGroup
    journal: Journal
    _newest: dict[WorkerHandle, Totals] = field(default_factory=dict)
    _began: dict[WorkerHandle, Totals] = field(default_factory=dict)  # of the open window, by rank
    _windows: list[_Window] = field(default_factory=list)
    _links: dict[WorkerHandle, Mapping[str, float]] = field(default_factory=dict)
    _laps: dict[str, dict[WorkerHandle, Totals]] = field(default_factory=dict)
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
        found = {m: p.timing for m in members if (p := progress.get(m)) and p.timing is not None}
        if not members or len(found) < len(members):
            return
        self._step = max(each.global_step for each in progress.values())
        self._links |= {m: p.links for m, p in progress.items() if p.links}
        if members != list(self._began):
            self._windows, self._slow, self._links = [], {}, {}
            new = self._with_saves(Totals())
            self._began = {member: self._newest.get(member, new) for member in members}
        self._newest = {member: self._with_saves(each) for member, each in found.items()}
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
            self._export(self._speeds([window]))

    def _export(self, speeds: Sequence[WorkerSpeed]) -> None:
        seconds = [(s, each.rank, name) for each in speeds for name, s in each.seconds.items()]
        export("raysgd_phase_seconds", "Mean seconds per step", ("rank", "phase"), seconds)
        rates = [(each.samples_per_s, each.rank) for each in speeds]
        export("raysgd_samples_per_second", "Samples per second", ("rank",), rates)

    def _with_saves(self, totals: Totals) -> Totals:
        seconds = [*totals.seconds]
        seconds[SAVE] += self._saved_s
        return totals._replace(seconds=tuple(seconds))

    def _open_window(self) -> _Window:
        rows = [_difference(self._newest[m], began) for m, began in self._began.items()]
        num_steps = max((row.num_steps for row in rows), default=0)
        return _Window(max(0, self._step - num_steps), rows)

    def _speeds(self, windows: Sequence[_Window]) -> list[WorkerSpeed]:
        return speeds_of(_summed(windows), [member.info.node_ip for member in self._began])

    # ---- results

    def report(self) -> SpeedReport:
        if not self._newest:
            return SpeedReport()
        windows = [*self._windows, self._open_window()]
        if not any(row.num_steps for row in _summed(windows)):
            return SpeedReport()
        workers, sentence = self._speeds(windows), self._sentence(windows)
        return SpeedReport(workers=workers, since_step=windows[0].step, sentence=sentence)

    def _sentence(self, windows: Sequence[_Window]) -> str:
        workers, whole = self._speeds(windows), [each for each in windows if each.has_steps]
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
        again = [find_cause(self._speeds([window]), 0, links) for window in whole]
        num_same = sum(each is not None and each[:2] == cause[:2] for each in again)
        if cause.phase != "save" and num_same < 0.6 * len(whole):
            return ""  # noise, or a few slow steps
        return cause.text

    def lap(self, kind: str) -> dict[str, list[float]]:
        """Return the mean seconds per step by phase and rank since the last lap of a kind."""
        before, self._laps[kind] = self._laps.get(kind, {}), self._newest
        rows = [_difference(now, before.get(m, Totals())) for m, now in self._newest.items()]
        speeds = speeds_of(rows, [""] * len(rows))
        if not rows or not all(row.num_steps for row in rows):
            return {}
        found = {f"{name}_s": [each.seconds[name] for each in speeds] for name in PHASES}
        return {**found, "samples_per_s": [each.samples_per_s for each in speeds]}

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
            times = [
                (w.per_step(phase, rank), _limit(usual[rank])) for w in recent for rank in usual
            ]
            if all(now_s <= most_s for now_s, most_s in times):
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
        now_s = statistics.mean(w.per_step(phase, rank) for w in recent for rank in ranks)
        usual_s = statistics.mean(usual.values())
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
    extra: dict[int, float] = {}
    slow: dict[int, dict[int, float]] = {}
    for rank in range(len(recent[0].rows)):
        step_s = statistics.median(
            sum(w.rows[rank].seconds) / w.rows[rank].num_steps for w in before
        )
        for phase in range(len(PHASES)):
            usual_s = statistics.median(window.per_step(phase, rank) for window in before)
            now_s = min(window.per_step(phase, rank) for window in recent)
            if now_s > _limit(usual_s, step_s):
                slow.setdefault(phase, {})[rank] = usual_s
                extra[phase] = max(extra.get(phase, 0.0), now_s - usual_s)
    if len(extra) > 1:
        extra.pop(WAIT, None)  # the other workers wait for a slow one
    if not extra:
        return None
    phase = max(extra, key=lambda each: extra[each])
    return phase, slow[phase]


def _limit(usual_s: float, step_s: float = 0.0) -> float:
    return max(_FACTOR * usual_s, usual_s + max(_LEAST_EXTRA_S, _LEAST_SHARE * step_s))


def _difference(new: Totals, old: Totals) -> Totals:
    if new.num_steps < old.num_steps:  # the worker has set up again
        return new
    seconds = tuple(a - b for a, b in zip(new.seconds, old.seconds, strict=True))
    num_steps, num_samples = new.num_steps - old.num_steps, new.num_samples - old.num_samples
    return Totals(seconds, num_steps, num_samples, new.loader_workers)


def _summed(windows: Sequence[_Window]) -> list[Totals]:
    """Return what each worker has measured in all windows, by rank."""
    return [
        Totals(
            tuple(map(sum, zip(*(row.seconds for row in rows), strict=True))),
            sum(row.num_steps for row in rows),
            sum(row.num_samples for row in rows),
            rows[-1].loader_workers,
        )
        for rows in zip(*(window.rows for window in windows), strict=True)
    ]
