"""The log files of a run folder, and the goodput computed from them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]

logger = logging.getLogger(__name__)

BREAKS = ("lost", "hung", "split", "user_error")
"""Kinds of events that stop training."""
_REPAIRS = ("resumed", "grown", "moved", "restarted")
_RUN = ("kind", "time", "global_step")
_CALL = ("kind", "time", "seconds", "epoch", "global_step", "num_workers", "metrics")
_EVENT = ("kind", "time", "seconds", "step", "ranks", "num_workers", "cause")


@dataclass
class RunLog:
    """The content of ``metrics.jsonl`` and ``events.jsonl``."""

    runs: list[Record] = field(default_factory=list)
    """One record for each trainer that used the folder."""
    calls: list[Record] = field(default_factory=list)
    """Finished calls of ``train`` and ``validate``, in order."""
    events: list[Record] = field(default_factory=list)
    points: list[Record] = field(default_factory=list)
    """Metrics of single steps, from ``fit(log_every=...)``."""

    @classmethod
    def read(cls, folder: str | Path) -> RunLog:
        """Read the logs, without lines whose writer was killed."""
        folder = Path(folder)
        path = folder / "metrics.jsonl"
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder} has no metrics.jsonl. Use the folder of a trainer: "
                "TorchTrainer(logdir=...)."
            )
        log = cls()
        for record in _records(path, _CALL):
            {"run": log.runs, "step": log.points}.get(record["kind"], log.calls).append(record)
        if (folder / "events.jsonl").is_file():
            log.events.extend(_records(folder / "events.jsonl", _EVENT))
        return log

    def of(self, kind: str) -> list[Record]:
        """Return the finished calls ("train" or "validate"), or the logged steps ("step")."""
        return [call for call in (*self.calls, *self.points) if call["kind"] == kind]

    def kept(self, kind: str) -> list[Record]:
        """Return the calls of a kind without those that a later run repeated."""
        return [
            call
            for call in self.of(kind)
            if not any(
                run["time"] > call["time"] and call["global_step"] > run["global_step"]
                for run in self.runs
            )
        ]

    @property
    def began(self) -> float:
        """The time of the first record, in seconds since the epoch."""
        times = [r["time"] for r in self.runs] + [c["time"] - c["seconds"] for c in self.calls]
        return min([*times, *(e["time"] for e in self.events)], default=0.0)

    @property
    def ended(self) -> float:
        """The time of the last record."""
        times = [r["time"] for r in (*self.runs, *self.calls, *self.points, *self.events)]
        return max(times, default=0.0)


def goodput(log: RunLog) -> float:
    """Return the share of the run's wall time that went into committed steps, from 0 to 1."""
    wall = log.ended - log.began
    return min(1.0, time_spent(log)["training"] / wall) if wall > 0 else 0.0


def time_spent(log: RunLog) -> dict[str, float]:
    """Return the seconds of the run's wall time, by activity.

    ``training`` is the time in ``train`` calls, without stops (from a failure to the next
    generation, and pauses in which replacements joined) and without repeated steps (after a restart
    from a snapshot, or in a resumed run).
    """
    trains = log.of("train")
    in_calls = sum(call["seconds"] for call in trains)
    stopped = sum(_overlap(call, list(_stops(log.events))) for call in trains)
    repeated = _num_repeated(log)
    num_steps = max((call["global_step"] for call in trains), default=0) + repeated
    lost = (in_calls - stopped) * repeated / num_steps if num_steps else 0.0
    starts = [call["time"] - call["seconds"] for call in log.calls]
    spent = {
        "training": in_calls - stopped - lost,
        "stopped": stopped,
        "repeated steps": lost,
        "validation": sum(call["seconds"] for call in log.of("validate")),
        "starting": sum(
            min((start for start in starts if start >= run["time"]), default=log.ended)
            - run["time"]
            for run in log.runs
        ),
    }
    spent["other: saving, callbacks, pauses"] = log.ended - log.began - sum(spent.values())
    return {name: max(0.0, seconds) for name, seconds in spent.items()}


def _num_repeated(log: RunLog) -> int:
    repeated = last_step = 0
    for before, run in pairwise(log.runs):
        calls = (c for c in log.of("train") if before["time"] <= c["time"] < run["time"])
        reached = max((call["global_step"] for call in calls), default=0)
        repeated += max(0, reached - run["global_step"])
    for event in log.events:
        if event["kind"] == "restarted":
            repeated += max(0, last_step - event["step"])
        last_step = event["step"]
    return repeated


def _stops(events: Sequence[Record]) -> Iterator[tuple[float, float]]:
    """Yield the times when training stopped and continued. The spans do not overlap."""
    broken_at: float | None = None
    repaired_at = 0.0
    for event in events:
        if event["kind"] == "started":
            broken_at = None  # the gap to another run is not a break
        elif event["kind"] in BREAKS and broken_at is None:
            broken_at = event["time"]
        elif event["kind"] in _REPAIRS:
            began = event["time"] - event["seconds"]
            if broken_at is not None:
                began = min(began, broken_at)
            yield max(began, repaired_at), event["time"]
            broken_at, repaired_at = None, event["time"]


def _overlap(call: Record, spans: Sequence[tuple[float, float]]) -> float:
    began: float = call["time"] - call["seconds"]
    ended: float = call["time"]
    return sum(max(0.0, min(end, ended) - max(begin, began)) for begin, end in spans)


def _records(path: Path, fields: Sequence[str]) -> Iterator[Record]:
    text = path.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            logger.warning("Skipped line %d of %s, which is incomplete.", number, path)
            continue
        needed = _RUN if isinstance(record, dict) and record.get("kind") == "run" else fields
        missing = [name for name in needed if not isinstance(record, dict) or name not in record]
        if missing:
            raise ValueError(
                f"{path}, line {number}: the record has no {', '.join(missing)}. Did raysgd write "
                "this file?"
            )
        yield record
