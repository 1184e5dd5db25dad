"""A page about a run, written from the logs in its folder."""

import contextlib
import datetime
import html
import json
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from raysgd._internal.files import atomic_write, read_lines
from raysgd._internal.step_timing import PHASES
from raysgd.callbacks.base import COUNTS, AnyTrainer, Callback, logdir_of

LogLine = dict[str, Any]

logger = logging.getLogger(__name__)

_MARKS = {"lost": "lost", "grown": "joined", "drained": "joined", "restarted": "restarted"}
"""Kinds of events with their marks in the charts."""
_MAX_GROUPS = 500
"""Number of groups of points or parts of a line. A browser cannot draw all of a long run."""
_SCRIPT = Path(__file__).with_name("report.js").read_text(encoding="utf-8")
_STYLE = """
body { margin: 2rem auto; padding: 0 1rem; max-width: 72rem; font-family: system-ui, sans-serif; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { text-align: left; padding: .3rem 1.2rem .3rem 0; vertical-align: top; }
th { font-weight: 500; color: #5b6472; } td { border-top: 1px solid #e3e6eb; min-width: 4rem; }
h1, h2, figcaption { overflow-wrap: anywhere; }
figure { margin: 0; } svg { width: 100%; height: auto; font-size: 12px; }
.grid { stroke: #e3e6eb; } .mark { stroke-dasharray: 4 3; stroke-width: 2; }
.line { fill: none; stroke-width: 2; }
figcaption { display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: .85rem; }
figcaption span::before { content: "\\25cf  "; color: var(--color); }
.log button { font-weight: bold; }
@media (max-width: 40rem) {
  th, td { min-width: 0; padding-right: .5rem; font-size: .8rem; }
  td:last-child { overflow-wrap: anywhere; }
}
"""


class RunReport(Callback):
    """Writes ``report.html`` into the trainer's ``logdir``. ``TorchTrainer(logdir=...)`` adds this.

    ``raysgd report LOGDIR`` writes the report at any other time.
    """

    order = 2  # run after the loggers
    needs_logdir = True

    def on_train_end(self, trainer: AnyTrainer) -> None:
        try:
            make_report(logdir_of(trainer))
        except (OSError, ValueError) as error:
            logger.warning(
                "Could not write report.html: %s To write it later, run: raysgd report %s",
                error,
                trainer.logdir,
            )


def make_report(folder: str | Path) -> Path:
    """Write ``report.html`` into a run folder, and return its path.

    Raises:
        FileNotFoundError: if the folder has no ``metrics.jsonl``.
        ValueError: if raysgd did not write the logs.
    """
    folder = Path(folder)
    with explain_log_errors(folder):
        text = _page(folder.resolve().name, RunLog(folder))
    path = folder / "report.html"
    with atomic_write(path) as file:
        file.write(text.encode(errors="replace"))  # JSON can contain half a surrogate pair
    return path


@contextlib.contextmanager
def explain_log_errors(folder: Path) -> Iterator[None]:
    """Raise ValueError if raysgd did not write the logs that are read in the context."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder} has a log that raysgd did not write: {error!r}. Use the folder of a "
            "trainer: TorchTrainer(logdir=...)."
        ) from error


class RunLog:
    """The content of ``metrics.jsonl`` and ``events.jsonl``."""

    def __init__(self, folder: Path) -> None:
        path = folder / "metrics.jsonl"
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder} has no metrics.jsonl. Use the folder of a trainer: "
                "TorchTrainer(logdir=...)."
            )
        records, self.events = read_lines(path), read_lines(folder / "events.jsonl")
        if path.stat().st_size and not records:
            raise TypeError("metrics.jsonl has no line in JSON")
        self.runs = [record for record in records if record["kind"] == "run"]
        everything = sorted((*self.events, *records), key=lambda record: record["time"])
        self.began: float = everything[0]["time"] if everything else 0.0
        self.seconds: float = everything[-1]["time"] - self.began if everything else 0.0
        self.calls: list[LogLine] = []
        """The calls without those that a later run repeated."""
        self.interruptions: list[tuple[int, float]] = []
        """Step and seconds of each time between two trainers."""
        resumed_at, reached, has_trained = None, sys.maxsize, False
        for record, before in pairwise([*reversed(everything), {}]):
            if record["kind"] == "run":
                resumed_at = record["global_step"]
                if has_trained:  # otherwise, nothing that this run loaded was trained again
                    reached = min(reached, resumed_at)
                has_trained = False
                continue
            has_trained = has_trained or record["kind"] in ("train", "step")
            if "step" not in record and record["global_step"] <= reached:
                self.calls.append(record)
                if record["kind"] in ("train", "step"):  # repeats steps if a file was loaded before
                    reached = record["global_step"]
            elif record["kind"] == "started" and before:
                step = before["step"] if "step" in before else before["global_step"]
                # The event does not know the state that its trainer has loaded since.
                record["step"] = step if resumed_at is None else resumed_at
                self.interruptions.append((record["step"], record["time"] - before["time"]))
                resumed_at = None
        self.calls.reverse()
        self.calls.sort(key=lambda call: call["global_step"])
        self.interruptions.reverse()
        self.idle_s: float = sum(seconds for _, seconds in self.interruptions)

    def steps(self) -> tuple[int, int]:
        """Return the first and the last step, for the axis of all charts."""
        steps = [record["global_step"] for record in (*self.runs, *self.calls)]
        return min(steps, default=0), max(steps, default=0)

    def marks(self) -> list[tuple[int, str, str]]:
        """Return the step, the kind, and a text for each mark in the charts."""
        found = [
            (event["step"], _MARKS[event["kind"]], f"{event['kind']}: {event['cause']}")
            for event in self.events
            if event["kind"] in _MARKS
        ]
        return [*found, *((step, "interrupted", f"{s:.0f} s") for step, s in self.interruptions)]

    def calls_of(self, kind: str) -> list[LogLine]:
        """Return the calls of a kind."""
        return [call for call in self.calls if call["kind"] == kind]

    def goodput(self) -> float:
        """Return the fraction of the time of trainers that went into committed steps, from 0 to 1.

        Each committed step counts with the mean seconds per step of its call, without saving.
        Failures, repeated steps, and the time between two trainers do not count.
        """
        trained, step = 0.0, self.steps()[0]
        for call in self.calls_of("train"):
            phases = _seconds_by_phase(call)
            step_s = sum(phases.values()) - phases.get("save", 0.0)
            trained += step_s * (call["global_step"] - step) if phases else call["seconds"]
            step = call["global_step"]
        ran = self.seconds - self.idle_s
        return min(1.0, trained / ran) if ran > 0 else 0.0


def _group_sizes(log: RunLog) -> list[tuple[int, int]]:
    """Return the number of workers by step, without steps that were repeated."""
    first, last = log.steps()
    sizes: list[tuple[int, int]] = []
    for event in log.events:
        step = max(first, event["step"])
        sizes = [size for size in sizes if size[0] <= step]
        sizes.append((step, event["num_workers"]))
    return [*sizes, (max(last, step), sizes[-1][1])]


def _page(name: str, log: RunLog) -> str:
    run: LogLine = log.runs[-1] if log.runs else {}
    title = html.escape(f"{run['operator']}: {name}" if "operator" in run else name)
    axis = {"steps": log.steps(), "marks": log.marks()}  # of all charts
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width">'
        # Add an empty icon, because the browser would request one.
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style>'
        f'<body data-run="{html.escape(json.dumps(axis))}"><h1>{title}</h1>'
        f"{_table(_key_figures(log, run))}{''.join(_sections(log, run))}"
        f"<script>{_SCRIPT}</script></html>"
    )


def _key_figures(log: RunLog, run: LogLine) -> Iterator[tuple[str, Any, str]]:
    """Yield the name, the value, and a note for each key figure."""
    began = datetime.datetime.fromtimestamp(log.began).astimezone()
    versions = ", ".join(map(" ".join, run.get("versions", {}).items()))
    yield "start", f"{began:%A, %d %B %Y, %H:%M:%S %Z}", versions
    if "device" in run:
        yield "workers", log.runs[0]["num_workers"], f"at the start, with {run['device']}"
    yield "lost workers", sum(event["kind"] == "lost" for event in log.events), ""
    if shares := [event["shares"] for event in log.events if event.get("shares")]:
        yield "shares of the workers", "/".join(f"{share:.2g}" for share in shares[-1]), ""
    idle = datetime.timedelta(seconds=round(log.idle_s))
    note = f"{idle} of it between two trainers" if log.interruptions else ""
    yield "duration", datetime.timedelta(seconds=round(log.seconds)), note
    yield "goodput", f"{100 * log.goodput():.1f} %", "time in committed steps while a trainer ran"
    if trains := log.calls_of("train"):
        yield "epochs", trains[-1]["epoch"], ""
        yield "steps", trains[-1]["global_step"], ""
    for kind, name, best_of in (
        ("train", "train_loss", min),
        ("validate", "val_loss", min),
        ("validate", "val_accuracy", max),
    ):
        calls = [call for call in log.calls_of(kind) if name in call["metrics"]]
        points = [(value, call["epoch"]) for value, call in _finite_values(calls, name)]
        if points:
            best, epoch = best_of(points)
            last = calls[-1]["metrics"][name]  # also if it is NaN
            yield f"last {name}", last, f"best {_format(best)}, in epoch {epoch}"


def _sections(log: RunLog, run: LogLine) -> Iterator[str]:
    yield from _metric_charts(log)
    speeds = [
        (call["global_step"], samples / call["seconds"])
        for samples, call in _finite_values(log.calls_of("train"), "num_samples")
        if call["seconds"] > 0
    ]
    if speeds:
        yield _chart("Samples per second", {"samples/s": _extremes(speeds)})
    if phases := _phases(log):
        yield _chart("Milliseconds per step", phases, starts_at_0=True)
    if log.events:
        yield _chart("Workers", {"workers": _group_sizes(log)}, starts_at_0=True, is_whole=True)
        fields = ("kind", "ranks", "step", "seconds", "cause")
        rows = [
            (f"{event['time'] - log.began:.2f}", *(event[name] for name in fields))
            for event in log.events
        ]
        yield f"<h2>Events</h2>{_table(rows, ('time (s)', *fields[:3], 'duration (s)', 'cause'))}"
    if config := run.get("config"):
        yield f"<h2>Config</h2>{_table((name, f'{v!r:.200}') for name, v in config.items())}"


def _phases(log: RunLog) -> dict[str, list[Any]]:
    """Return a stack for each group of calls: the mean milliseconds per step of each phase."""
    calls = max(log.calls_of("step"), log.calls_of("train"), key=len)
    lines: dict[str, list[Any]] = {phase: [] for phase in PHASES}
    step = log.steps()[0]
    for group in _groups(calls):
        seconds = [*map(_seconds_by_phase, group)]
        means = (1000 * fmean(each.get(phase, 0.0) for each in seconds) for phase in PHASES)
        bounds = pairwise(accumulate(means, initial=0.0))
        for phase, (base, top) in zip(PHASES, bounds, strict=True):
            if top > base:
                lines[phase].append((step, group[-1]["global_step"], base, top))
        step = group[-1]["global_step"]
    return {name: stack for name, stack in lines.items() if stack}


def _groups(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Divide items into groups of equal length, up to the last one."""
    size = -(-len(items) // _MAX_GROUPS)
    for start in range(0, len(items), size or 1):
        yield items[start : start + size]


def _extremes(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the points with the lowest and the highest value of each group."""
    if len(points) <= 2 * _MAX_GROUPS:
        return points
    ranked = (sorted(group, key=itemgetter(1)) for group in _groups(points))
    return [point for group in ranked for point in sorted((group[0], group[-1]))]


def _seconds_by_phase(call: LogLine) -> dict[str, float]:
    """Return the mean seconds per step of each phase, or nothing if they are unknown."""
    speed = call.get("speed", {})
    return {name: fmean(speed[f"{name}_s"]) for name in PHASES if f"{name}_s" in speed}


def _table(rows: Iterable[Sequence[Any]], head: Sequence[str] = ()) -> str:
    names = "".join(f"<th>{name}</th>" for name in head)
    cells = ("".join(f"<td>{html.escape(_format(cell))}</td>" for cell in row) for row in rows)
    return f"<table><tr>{names}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _metric_charts(log: RunLog) -> Iterator[str]:
    """Yield a chart for the losses, one for the accuracies, and one for each other group."""
    charts: dict[str, dict[str, list[Any]]] = {"Loss": {}, "Accuracy": {}}
    for kind in ("train", "validate", "step"):
        calls = log.calls_of(kind)
        for name in dict.fromkeys(name for call in calls for name in call["metrics"]):
            if name.startswith("last_") or name in COUNTS:
                continue
            points = [(c["global_step"], float(f"{v:.6g}")) for v, c in _finite_values(calls, name)]
            if points:
                shown = f"{name}, by step" if kind == "step" else name
                charts.setdefault(_group_of(name), {})[shown] = _extremes(points)
    for title, lines in charts.items():
        if lines:
            yield _chart(title, lines)


def _group_of(name: str) -> str:
    for word, title in (("loss", "Loss"), ("acc", "Accuracy")):
        if word in name:
            return title
    # Entries of one vector or dict share a chart: val_f1_0 and val_f1_1, profile/mean_fwd_s.
    whole = name.removeprefix("train_").removeprefix("val_").partition("/")[0]
    return re.sub(r"([-_]\d+)+$", "", whole) or name


def _chart(title: str, lines: dict[str, list[Any]], **options: bool) -> str:
    """Return a figure that report.js draws."""
    data = html.escape(json.dumps({"lines": list(lines.items()), **options}))
    figure = f'<figure data-chart="{data}"><figcaption></figcaption><svg></svg></figure>'
    return f"<h2>{html.escape(title)}</h2>{figure}"


def _finite_values(calls: Iterable[LogLine], name: str) -> Iterator[tuple[float, LogLine]]:
    """Yield the finite values of a metric with their calls."""
    for call in calls:
        value = call["metrics"].get(name)
        if isinstance(value, int | float) and abs(value) <= sys.float_info.max:
            yield value, call


def _format(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
