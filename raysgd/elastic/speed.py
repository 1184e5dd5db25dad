"""Why training is slow: a table of the seconds per step by worker and phase, and one sentence."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from raysgd._internal.step_timing import PHASES, Totals

__all__ = ["SpeedReport", "WorkerSpeed"]

_FACTOR = 1.5
"""Factor by which a worker must be slower than the others."""
_LEAST_STEP_S = 0.002
"""Seconds per step below which no advice helps."""
_LEAST_SHARES = {"save": 0.2, "data": 0.3, "copy": 0.3, "other": 0.15, "wait": 0.6}
"""Shares of the time from which a phase of all workers is worth a sentence."""
_STRAGGLER_SHARE = 0.2
"""Share of a step that a slow worker must cost the others."""
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
    seconds: Mapping[str, float]
    """Mean seconds per step by phase: ``data``, ``copy``, ``forward``, ``backward``, ``wait`` (for
    other workers), ``optimizer``, ``save`` (checkpoints and snapshots), and ``other``."""
    loader_workers: int | None = None
    """``num_workers`` of the train loader; None if it has no such attribute."""

    @property
    def step_s(self) -> float:
        """Mean seconds per step."""
        return sum(self.seconds.values())

    @property
    def computing_s(self) -> float:
        """Mean seconds per step of computing."""
        return sum(self.seconds[name] for name in ("copy", "forward", "backward", "optimizer"))

    @property
    def busy_s(self) -> float:
        """Mean seconds per step without the wait for other workers."""
        return self.step_s - self.seconds["wait"]


@dataclass(frozen=True, kw_only=True)
class SpeedReport:
    """The result of ``trainer.speed()``. Its text is a table, and the sentence."""

    workers: Sequence[WorkerSpeed] = ()
    """The workers by rank."""
    since_step: int = 0
    """The step at which the measurement began: the last change of the group or of the speed."""
    sentence: str = ""
    """Which phase is slow, where, and what to try. Empty if nothing is wrong."""

    def __str__(self) -> str:
        shown = [n for n in PHASES if any(w.seconds[n] >= 5e-6 for w in self.workers)]
        rows = [("ms per step", *shown, "sum", "samples/s")]
        for each in self.workers:
            values = [each.seconds[name] * 1000 for name in shown]
            cells = [f"{value:.3g}" for value in (*values, each.step_s * 1000)]
            rows.append((f"worker {each.rank} on {each.host}", *cells, f"{each.samples_per_s:.0f}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in rows
        ]
        return "\n".join([*lines, self.sentence] if self.sentence else lines)


class Cause(NamedTuple):
    """What slows training down: a phase, and the rank of the slow worker, or None for all."""

    phase: str
    rank: int | None
    text: str


def find_cause(
    workers: Sequence[WorkerSpeed], links: Mapping[tuple[str, str], float] | None = None
) -> Cause | None:
    """Return why training is slow, or None if nothing is wrong.

    `links` are bytes per second from host to host. Workers wait for each other in each step. So the
    slowest worker computes longest and waits least.
    """
    if len(workers) > 1 and (cause := _straggler(workers)):
        return cause
    step_s = statistics.mean(each.step_s for each in workers)
    shares = {
        name: min(each.seconds[name] for each in workers) / step_s if step_s else 0.0
        for name in _LEAST_SHARES
    }
    name = max(shares, key=lambda each: shares[each] / _LEAST_SHARES[each])
    if shares[name] < _LEAST_SHARES[name] or shares[name] * step_s < _LEAST_STEP_S:
        return None
    share = f"{100 * shares[name]:.0f} % of the"
    everywhere = " on all workers" if len(workers) > 1 else ""
    match name:
        case "save":
            text = (
                f"{share} time goes into checkpoints and snapshots{{since}}: save less often or to "
                "a faster disk, or use CheckpointCallback(blocking=False)."
            )
        case "data":
            text = f"{share} step waits for data{everywhere}{{since}}: {_for_loader(workers[0])}."
        case "copy":
            text = (
                f"{share} step copies batches to the device{everywhere}{{since}}: use "
                "DataLoader(pin_memory=True), or send smaller dtypes."
            )
        case "other":
            text = (
                f"{share} step is code outside of forward, backward, and optimizer{everywhere}"
                "{since}: print, log, and call .item() less often."
            )
        case _:
            return Cause(name, *_slow_link(workers, share, links or {}))
    return Cause(name, None, text)


def _straggler(workers: Sequence[WorkerSpeed]) -> Cause | None:
    slowest = max(workers, key=lambda each: each.busy_s)
    others = [each for each in workers if each is not slowest]
    usual_s = statistics.median(each.busy_s for each in others)
    extra_s = slowest.busy_s - usual_s
    if (
        slowest.busy_s < _FACTOR * usual_s
        or extra_s < _LEAST_STEP_S
        or extra_s < _STRAGGLER_SHARE * slowest.step_s
    ):
        return None
    usual = {name: statistics.median(w.seconds[name] for w in others) for name in PHASES}
    computing_s = statistics.median(each.computing_s for each in others)
    extra = {name: slowest.seconds[name] - usual[name] for name in ("data", "save", "other")}
    extra["forward"] = slowest.computing_s - computing_s
    name = max(extra, key=lambda each: extra[each])
    # A busy processor slows down everything, also a loader in the same process.
    if slowest.computing_s > _FACTOR * computing_s and extra["forward"] > 0.25 * extra_s:
        name = "forward"
    now, before = slowest.seconds[name], usual[name]
    if name == "forward":
        now, before = slowest.computing_s, computing_s
    times = f"{now / before:.1f} times" if 20 * before > now else "much"
    longer = f"{times} longer than the others{{since}}"
    who = f"Worker {slowest.rank} on {slowest.host}"
    match name:
        case "data":
            share = 100 * now / slowest.step_s
            text = (
                f"{who} waits for data {longer}, {share:.0f} % of its step: "
                f"{_for_loader(slowest)}, or look at its disk."
            )
        case "save":
            text = f"{who} saves {longer}: take snapshots less often."
        case "other":
            text = (
                f"{who} runs code outside of forward, backward, and optimizer {longer}: look for "
                "printing, logging, and .item() on this worker."
            )
        case _:
            text = (
                f'{who} computes {longer}: use ElasticConfig(shares="measured"), or look at its '
                "host."
            )
    return Cause(name, slowest.rank, text)


def _for_loader(worker: WorkerSpeed) -> str:
    if worker.loader_workers is None:
        return "load the data in other processes, as DataLoader(num_workers=2) does"
    return f"raise DataLoader(num_workers={worker.loader_workers})"


def _slow_link(
    workers: Sequence[WorkerSpeed], share: str, links: Mapping[tuple[str, str], float]
) -> tuple[int | None, str]:
    """Return the rank of the worker with a slow connection, or None, and the sentence."""
    waits = f"{share} step waits for gradients"
    advice = "look at its network, or use larger batches or gradient_accumulation_steps"
    best, found = _LINK_FACTOR, None
    for host in {each.host for each in workers}:
        own = [rate for hosts, rate in links.items() if host in hosts]
        rest = [rate for hosts, rate in links.items() if host not in hosts]
        if own and rest and statistics.median(rest) >= best * max(own):
            best, found = statistics.median(rest) / max(own), (host, max(own), min(rest))
    if found is None:
        return None, f"{waits} on all workers{{since}}: {advice.replace('its', 'the')}."
    host, own_rate, rate = found
    ranks = [each.rank for each in workers if each.host == host]
    who = f"worker {ranks[0]} on {host} sends" if len(ranks) == 1 else f"the workers on {host} send"
    text = (
        f"{waits}{{since}}, because {who} at {own_rate / 1e6:.1f} MB/s, and the others at "
        f"{rate / 1e6:.1f} MB/s: {advice}."
    )
    return ranks[0], text


def speeds_of(rows: Sequence[Totals], hosts: Sequence[str]) -> list[WorkerSpeed]:
    """Return the speeds of workers, given what each has measured, by rank."""
    return [
        WorkerSpeed(
            rank=rank,
            host=host,
            num_steps=row.num_steps,
            samples_per_s=row.num_samples / (sum(row.seconds) or 1.0),
            seconds={
                name: seconds / max(1, row.num_steps)
                for name, seconds in zip(PHASES, row.seconds, strict=True)
            },
            loader_workers=row.loader_workers,
        )
        for rank, (row, host) in enumerate(zip(rows, hosts, strict=True))
    ]
