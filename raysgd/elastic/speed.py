"""Why training is slow: a table of the seconds per step by worker and phase, and one sentence."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from raysgd._internal.step_timing import PHASES

__all__ = ["SpeedReport", "WorkerSpeed"]

_SLOW_BY = 1.5
"""Factor by which a worker must be slower than the others."""
_MIN_STEP_S = 0.002
"""Seconds per step below which no advice helps."""
_MIN_FRACTIONS = {"save": 0.2, "data": 0.3, "copy": 0.3, "other": 0.15, "wait": 0.6}
"""Fractions of the time from which a phase of all workers is worth a sentence."""
_STRAGGLER_FRACTION = 0.2
"""Fraction of a step that a slow worker must cost the others."""
_LINK_FACTOR = 3.0
"""Factor by which a connection must be slower than the others."""


@dataclass(frozen=True, kw_only=True)
class WorkerSpeed:
    """The speed of one worker."""

    rank: int
    """World rank of the worker."""
    host: str
    """Address of its host."""
    num_steps: int
    """Number of measured steps."""
    samples_per_s: float
    """Samples per second; 0 if unknown."""
    phase_s: Mapping[str, float]
    """Mean seconds per step by phase: ``data``, ``copy``, ``forward``, ``backward``, ``wait`` (for
    other workers), ``optimizer``, ``save`` (checkpoints and snapshots), and ``other``."""
    num_loader_workers: int | None = None
    """``num_workers`` of the train loader; None if it has no such attribute."""

    @property
    def step_s(self) -> float:
        """Mean seconds per step."""
        return sum(self.phase_s.values())

    @property
    def computing_s(self) -> float:
        """Mean seconds per step of computing."""
        return sum(self.phase_s[name] for name in ("copy", "forward", "backward", "optimizer"))

    @property
    def busy_s(self) -> float:
        """Mean seconds per step without the wait for other workers."""
        return self.step_s - self.phase_s["wait"]


@dataclass(frozen=True, kw_only=True)
class SpeedReport:
    """The result of ``trainer.speed()``. Its text is a table, and the advice."""

    workers: Sequence[WorkerSpeed] = ()
    """The workers by rank."""
    since_step: int = 0
    """The step at which the measurement began: the last change of the group."""
    advice: str = ""
    """Which phase is slow, where, and what to try. Empty if nothing is wrong."""

    def __str__(self) -> str:
        shown = [n for n in PHASES if any(w.phase_s[n] >= 5e-6 for w in self.workers)]
        rows = [("ms per step", *shown, "sum", "samples/s")]
        for each in self.workers:
            values = [each.phase_s[name] * 1000 for name in shown]
            cells = [f"{value:.3g}" for value in (*values, each.step_s * 1000)]
            rows.append((f"worker {each.rank} on {each.host}", *cells, f"{each.samples_per_s:.0f}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in rows
        ]
        return "\n".join([*lines, self.advice] if self.advice else lines)


_ADVICE_FOR_ALL = {
    "save": "{percent} time goes into checkpoints and snapshots{since}: save less often or to a "
    "faster disk, or use CheckpointCallback(blocking=False).",
    "data": "{percent} step waits for data{all}{since}: {loader}.",
    "copy": "{percent} step copies batches to the device{all}{since}: use "
    "DataLoader(pin_memory=True), or send smaller dtypes.",
    "other": "{percent} step is code outside of forward, backward, and optimizer{all}{since}: "
    "print, log, and call .item() less often, or look at the loss.",
    "wait": "{percent} step waits for gradients{since}, {why}: look at the network, or use larger "
    "batches or gradient_accumulation_steps.",
}
_ADVICE_FOR_ONE = {
    "data": "waits for data {longer}, {percent} step: {loader}, or look at its disk.",
    "save": "saves {longer}: take snapshots less often.",
    "other": "runs code outside of forward, backward, and optimizer {longer}: look for printing, "
    "logging, and .item() on this worker.",
    "computing": 'computes {longer}: use ElasticConfig(shares="measured"), or look at its host.',
}


class Bottleneck(NamedTuple):
    """What slows training down: a phase, and the rank of the slow worker, or None for all."""

    phase: str
    rank: int | None
    advice: str


def find_bottleneck(
    workers: Sequence[WorkerSpeed],
    since_step: int = 0,
    link_speeds: Mapping[tuple[str, str], float] | None = None,
) -> Bottleneck | None:
    """Return why training is slow, or None if nothing is wrong.

    `link_speeds` are bytes per second from host to host. Workers wait for each other in each step.
    So the slowest worker computes longest and waits least.
    """
    since = f" since step {since_step:,}"
    if len(workers) > 1 and (found := _find_straggler(workers, since)):
        return found
    step_s = statistics.mean(each.step_s for each in workers)
    least_s = {name: min(each.phase_s[name] for each in workers) for name in _ADVICE_FOR_ALL}
    phase = max(least_s, key=lambda name: least_s[name] / _MIN_FRACTIONS[name])
    if least_s[phase] < max(_MIN_FRACTIONS[phase] * step_s, _MIN_STEP_S):
        return None
    rank, why = _find_slow_link(workers, link_speeds or {}) if phase == "wait" else (None, "")
    advice = _ADVICE_FOR_ALL[phase].format(
        percent=f"{100 * least_s[phase] / step_s:.0f} % of the",
        since=since,
        all=" on all workers" if len(workers) > 1 else "",
        loader=_advice_for_loader(workers[0]),
        why=why,
    )
    return Bottleneck(phase, rank, advice)


def _find_straggler(workers: Sequence[WorkerSpeed], since: str) -> Bottleneck | None:
    slowest = max(workers, key=lambda each: each.busy_s)
    others = [each for each in workers if each is not slowest]
    extra_s = slowest.busy_s - statistics.median(each.busy_s for each in others)
    least_s = max(_STRAGGLER_FRACTION * slowest.step_s, _MIN_STEP_S)
    if extra_s < least_s or slowest.busy_s < _SLOW_BY * (slowest.busy_s - extra_s):
        return None
    slow = {**slowest.phase_s, "computing": slowest.computing_s}
    usual = {name: statistics.median(each.phase_s[name] for each in others) for name in PHASES}
    usual["computing"] = statistics.median(each.computing_s for each in others)
    extra = {name: slow[name] - usual[name] for name in _ADVICE_FOR_ONE}
    phase = max(extra, key=lambda name: extra[name])
    # A busy processor slows down everything, also a loader in the same process.
    if slow["computing"] > _SLOW_BY * usual["computing"] and extra["computing"] > 0.25 * extra_s:
        phase = "computing"
    is_known = 20 * usual[phase] > slow[phase]
    times = f"{slow[phase] / usual[phase]:.1f} times" if is_known else "much"
    advice = _ADVICE_FOR_ONE[phase].format(
        longer=f"{times} longer than the others{since}",
        percent=f"{100 * slow[phase] / slowest.step_s:.0f} % of the",
        loader=_advice_for_loader(slowest),
    )
    return Bottleneck(phase, slowest.rank, f"Worker {slowest.rank} on {slowest.host} {advice}")


def _advice_for_loader(worker: WorkerSpeed) -> str:
    if worker.num_loader_workers is None:
        return "load the data in other processes, as DataLoader(num_workers=2) does"
    return f"raise DataLoader(num_workers={worker.num_loader_workers})"


def _find_slow_link(
    workers: Sequence[WorkerSpeed], link_speeds: Mapping[tuple[str, str], float]
) -> tuple[int | None, str]:
    """Return the rank of a worker with a slow connection, or None, and who waits for what."""
    best, slowest = _LINK_FACTOR, None
    for host in {each.host for each in workers}:
        own = max((rate for hosts, rate in link_speeds.items() if host in hosts), default=0.0)
        rest = [rate for hosts, rate in link_speeds.items() if host not in hosts]
        if own and rest and statistics.median(rest) >= best * own:
            best, slowest = statistics.median(rest) / own, (host, own, statistics.median(rest))
    if slowest is None:
        return None, "on all workers"
    host, own, others = slowest
    ranks = [each.rank for each in workers if each.host == host]
    who = f"worker {ranks[0]} on {host} sends" if len(ranks) == 1 else f"the workers on {host} send"
    return ranks[0], f"because {who} {own / 1e6:.1f} MB/s, and the others {others / 1e6:.1f} MB/s"
