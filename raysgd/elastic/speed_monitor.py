"""Collects the times of the workers, and finds the bottleneck of each second."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from raysgd._internal.step_timing import PHASES, SAVE, PhaseTotals
from raysgd._internal.worker_status import WorkerStatus
from raysgd.cluster.actor_group import ActorGroup
from raysgd.cluster.worker_handle import WorkerHandle
from raysgd.elastic.speed import SpeedReport, WorkerSpeed, find_bottleneck

_WINDOW_S = 1.0
_MIN_S, _MIN_STEPS = 3.0, 10
"""Training that is too short for advice."""

_ByWorker = Mapping[WorkerHandle, PhaseTotals]


class SpeedMonitor:
    """Collects the times of the workers. The measurement begins again when the group changes.

    A bottleneck counts if it is found in most windows of a second.
    """

    def __init__(self, group: ActorGroup) -> None:
        self._group = group
        self._totals: _ByWorker = {}  # as the workers have reported them
        self._newest: _ByWorker = {}  # with saves, as the following ones
        self._group_start: _ByWorker = {}  # by rank
        self._window_start: _ByWorker = {}  # by rank
        self._num_windows: Counter[tuple[str, int | None] | None] = Counter()
        """Numbers of windows by their phase and rank, or None for a window that is not slow."""
        self._link_speeds: dict[tuple[str, str], float] = {}  # bytes/s by hosts
        self._starts: dict[str, tuple[PhaseTotals, _ByWorker]] = {}  # by kind
        self._step = 0  # the newest that workers have reported
        self._saved_s = 0.0
        self._is_saving = False

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

    def observe(self, statuses: Mapping[WorkerHandle, WorkerStatus]) -> None:
        members = list(self._group.members)
        measured = {member: each.measured for member, each in statuses.items()}
        timings = {m: t for m in members if m in measured and (t := measured[m].timing) is not None}
        if not members or len(timings) < len(members):
            return
        self._step = max(each.position.global_step for each in statuses.values())
        for member, each in measured.items():
            host, speeds = member.location.node_ip, each.link_speeds
            self._link_speeds |= {(host, address): rate for address, rate in speeds.items()}
        if members != list(self._group_start):
            self._link_speeds.clear()
            new = self._with_saves(PhaseTotals())
            self._group_start = self._window_start = {m: self._newest.get(m, new) for m in members}
            self._num_windows.clear()
        self._totals = timings
        self._newest = {member: self._with_saves(each) for member, each in timings.items()}
        workers = _speeds(self._window_start, self._newest)
        if _seconds(workers) >= _WINDOW_S and all(worker.num_steps for worker in workers):
            found = find_bottleneck(workers, 0, self._link_speeds)
            self._num_windows[None if found is None else found[:2]] += 1
            self._window_start = self._newest

    def _with_saves(self, totals: PhaseTotals) -> PhaseTotals:
        phase_s = list(totals.phase_s)
        phase_s[SAVE] += self._saved_s
        return totals._replace(phase_s=tuple(phase_s))

    # ---- results

    def report(self) -> SpeedReport:
        workers = _speeds(self._group_start, self._newest)
        if not any(worker.num_steps for worker in workers):
            return SpeedReport()
        since = max(0, self._step - max(worker.num_steps for worker in workers))
        advice = self._advice(workers, since) if _seconds(workers) >= _MIN_S else ""
        return SpeedReport(workers=workers, since_step=since, advice=advice)

    def _advice(self, workers: Sequence[WorkerSpeed], since_step: int) -> str:
        found = find_bottleneck(workers, since_step, self._link_speeds)
        if found is None or any(each.num_steps < _MIN_STEPS for each in workers):
            return ""
        if found.phase != "save" and self._num_windows[found[:2]] < 0.6 * self._num_windows.total():
            return ""  # noise, or a few slow steps
        return found.advice

    def end_interval(
        self, kind: str, timing: Mapping[WorkerHandle, PhaseTotals] | None = None
    ) -> dict[str, list[float]]:
        """Return the mean seconds per step by phase and rank since the last interval of a kind.

        It ends at `timing`, or at the newest times.
        """
        totals = self._totals if timing is None else timing
        newest = {member: self._with_saves(each) for member, each in totals.items()}
        new, before = self._starts.get(kind, (PhaseTotals(), {}))
        self._starts[kind] = self._with_saves(PhaseTotals()), newest  # the first of later workers
        workers = _speeds({member: before.get(member, new) for member in newest}, newest)
        if not (workers and all(worker.num_steps for worker in workers)):
            return {}
        seconds = {f"{name}_s": [worker.phase_s[name] for worker in workers] for name in PHASES}
        return {**seconds, "samples_per_s": [worker.samples_per_s for worker in workers]}


def _speeds(began: _ByWorker, ended: _ByWorker) -> list[WorkerSpeed]:
    """Return the speeds of workers between two times, by rank."""
    speeds = []
    for rank, (member, old) in enumerate(began.items()):
        new = ended[member]
        old = PhaseTotals() if new.num_steps < old.num_steps else old  # it may have set up again
        num_steps, num_samples = new.num_steps - old.num_steps, new.num_samples - old.num_samples
        spent = [now - before for now, before in zip(new.phase_s, old.phase_s, strict=True)]
        speed = WorkerSpeed(
            rank=rank,
            host=member.location.node_ip,
            num_steps=num_steps,
            samples_per_s=num_samples / (sum(spent) or 1.0),
            phase_s={n: s / max(1, num_steps) for n, s in zip(PHASES, spent, strict=True)},
            num_loader_workers=new.num_loader_workers,
        )
        speeds.append(speed)
    return speeds


def _seconds(workers: Sequence[WorkerSpeed]) -> float:
    return max((each.step_s * max(1, each.num_steps) for each in workers), default=0.0)
