"""What a run has written into its folder, and how much of its time went into training."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

__all__ = ["BREAKS", "Record", "RunLog", "goodput", "time_spent"]

Record = Mapping[str, Any]

logger = logging.getLogger(__name__)

BREAKS = ("lost", "hung", "split", "user_error")
"""Kinds of events after which training stands still."""
_MENDS = ("resumed", "grown", "moved", "restarted")
_RUN = ("kind", "time")
_CALL = ("kind", "time", "seconds", "epoch", "global_step", "num_workers", "metrics")
_EVENT = ("kind", "time", "seconds", "step", "ranks", "cause")
"""What a record of each sort has at the least."""
_FIELDS = (*_CALL, *_EVENT)
_MOST = 1e11
"""Seconds that no clock shows before the year 5138, and steps that nobody makes."""


@dataclass
class RunLog:
    """What ``metrics.jsonl`` and ``events.jsonl`` of a run folder hold."""

    runs: list[Record] = field(default_factory=list)
    """One record each time that a trainer was started on the folder."""
    calls: list[Record] = field(default_factory=list)
    """Finished calls of ``train`` and ``validate``, in order."""
    events: list[Record] = field(default_factory=list)
    points: list[Record] = field(default_factory=list)
    """What was measured by the step."""

    @classmethod
    def read(cls, folder: str | Path) -> RunLog:
        """Read the logs; lines that were not written to their end are left out.

        Raises:
            FileNotFoundError: if the folder has no ``metrics.jsonl``.
            ValueError: if a line is JSON, but no record of a run, or a value in it cannot be.
        """
        folder = Path(folder)
        path = folder / "metrics.jsonl"
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder} is no folder of a run: it has no metrics.jsonl. Train with "
                "TorchTrainer(logdir=...), and give that folder."
            )
        log = cls()
        for record in _lines(path, _RUN, _CALL):
            {"run": log.runs, "step": log.points}.get(record["kind"], log.calls).append(record)
        if (folder / "events.jsonl").is_file():
            log.events.extend(_lines(folder / "events.jsonl", _EVENT, _EVENT))
        return log

    def of(self, kind: str) -> list[Record]:
        """Return the finished calls of one kind, "train" or "validate"; or the points, "step"."""
        return [call for call in (*self.calls, *self.points) if call["kind"] == kind]

    def kept(self, kind: str) -> list[Record]:
        """Return those calls of one kind beyond which no later run began: the others were in vain.

        A run of an older version does not say where it began, and takes nothing back.
        """
        return [
            call
            for call in self.of(kind)
            if not any(
                run["time"] > call["time"]
                and call["global_step"] > run.get("global_step", call["global_step"])
                for run in self.runs
            )
        ]

    @property
    def began(self) -> float:
        """When the run began, in seconds since the epoch."""
        times = [r["time"] for r in self.runs] + [c["time"] - c["seconds"] for c in self.calls]
        return min([*times, *(e["time"] for e in self.events)], default=0.0)

    @property
    def ended(self) -> float:
        """When it was last heard of."""
        times = [r["time"] for r in (*self.runs, *self.calls, *self.points, *self.events)]
        return max(times, default=0.0)


def goodput(log: RunLog) -> float:
    """Return the share of the run's wall time that went into committed steps, from 0 to 1.

    That is the time of the finished ``train`` calls, less the time in them in which training stood
    still (from a loss, a hang or an error to the generation that followed, and the pauses in which
    replacements joined), less the time of the steps that were done again, after a restart from a
    snapshot or by a run that was resumed; divided by the time from the first record to the last.
    """
    wall = log.ended - log.began
    trains = log.of("train")
    if wall <= 0 or not trains:
        return 0.0
    stood_still = list(_standstills(log.events))
    useful: float = sum(call["seconds"] - _overlap(call, stood_still) for call in trains)
    redone, last_step = _redone_by_runs(log), 0
    for event in log.events:
        if event["kind"] == "restarted":
            redone += max(0, last_step - event["step"])
        last_step = event["step"]
    done = max(call["global_step"] for call in trains) + redone
    if done > 0:
        useful *= 1 - redone / done
    return max(0.0, min(1.0, useful / wall))


def time_spent(log: RunLog) -> dict[str, float]:
    """Return into what the run's wall time went, in seconds: training first, what it lost then.

    ``training`` is what `goodput` counts. Where times overlap, the first counts.
    """
    wall, trains = log.ended - log.began, log.of("train")
    spent = {"training": goodput(log) * wall}
    spent["standing still"] = sum(_overlap(call, list(_standstills(log.events))) for call in trains)
    in_calls = sum(call["seconds"] for call in trains)
    spent["steps done again"] = max(0.0, in_calls - sum(spent.values()))
    spent["validation"] = sum(call["seconds"] for call in log.of("validate"))
    starts = [call["time"] - call["seconds"] for call in log.calls]
    times = [
        (run["time"], min((s for s in starts if s >= run["time"]), default=log.ended))
        for run in log.runs
    ]
    spent["starting"] = sum(until - since for since, until in times)
    spent["other: saving, callbacks, pauses between calls and runs"] = wall - sum(spent.values())
    return {name: max(0.0, seconds) for name, seconds in spent.items()}


def _redone_by_runs(log: RunLog) -> int:
    """Return how many steps runs did again, since they began before what was reached and logged."""
    redone = 0
    for before, run in pairwise(log.runs):
        calls = (c for c in log.of("train") if before["time"] <= c["time"] < run["time"])
        reached = max((call["global_step"] for call in calls), default=0)
        # logs of older versions do not say where a run began
        redone += max(0, reached - run.get("global_step", reached))
    return redone


def _standstills(events: Sequence[Record]) -> Iterator[tuple[float, float]]:
    """Yield the spans of time in which training stood still, one after the other."""
    broken_at: float | None = None
    mended_at = 0.0
    for event in events:
        if event["kind"] == "started":
            broken_at = None  # another run: what broke the one before has ended with it
        elif event["kind"] in BREAKS and broken_at is None:
            broken_at = event["time"]
        elif event["kind"] in _MENDS:
            began = event["time"] - event["seconds"]
            if broken_at is not None:
                began = min(began, broken_at)
            yield max(began, mended_at), event["time"]
            broken_at, mended_at = None, event["time"]


def _overlap(call: Record, spans: Sequence[tuple[float, float]]) -> float:
    began: float = call["time"] - call["seconds"]
    ended: float = call["time"]
    return sum(max(0.0, min(end, ended) - max(begin, began)) for begin, end in spans)


def _lines(path: Path, run: Sequence[str], other: Sequence[str]) -> Iterator[Record]:
    text = path.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            logger.warning("Left out line %d of %s: its writer was killed in it.", number, path)
            continue
        except (ValueError, RecursionError) as error:  # too many digits, or brackets
            raise ValueError(f"{path}, line {number}: this cannot be read: {error}.") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: this is no JSON object.")
        needed = run if record.get("kind") == "run" else other
        if missing := [name for name in needed if name not in record]:
            raise ValueError(
                f"{path}, line {number}: this is no record of a run: it lacks {', '.join(missing)}."
            )
        for name in _FIELDS:
            if name in record and not _fits(name, record[name]):
                raise ValueError(
                    f"{path}, line {number}: this is no record of a run: its {name} is "
                    f"{record[name]!r:.80}."
                )
        yield record


def _fits(name: str, value: Any) -> bool:
    """Whether a field of a record, which anybody may have written, has a value that it can have."""
    if name in ("kind", "cause"):
        return isinstance(value, str)
    if name == "metrics":
        return isinstance(value, dict)
    if name == "ranks":
        return isinstance(value, list) and all(type(rank) is int for rank in value)
    kinds = (int, float) if name in ("time", "seconds") else (int,)
    return type(value) in kinds and 0 <= value <= _MOST
