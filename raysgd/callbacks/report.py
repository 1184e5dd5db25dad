"""A page about a run, written from the logs in its folder."""

from __future__ import annotations

import datetime
import html
import json
import logging
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from raysgd._internal.files import replacing
from raysgd._internal.imports import import_extra
from raysgd._internal.step_timing import PHASES
from raysgd.callbacks.base import Callback, Trainer

Record = Mapping[str, Any]

logger = logging.getLogger(__name__)

_COUNTS = ("epoch", "batch_count", "num_samples", "profile")
_STYLE = """
body { margin: 2rem auto; padding: 0 1.5rem; max-width: 72rem; font-family: system-ui, sans-serif; }
table { border-collapse: collapse; } th, td { text-align: left; padding: .3rem 1.2rem .3rem 0; }
th { font-weight: 500; color: #5b6472; } td { border-top: 1px solid #e3e6eb; }
"""


class RunReport(Callback):
    """Writes ``report.html`` into the trainer's ``logdir``. ``TorchTrainer(logdir=...)`` adds this.

    ``raysgd report RUNDIR`` writes the report at any other time.
    """

    stage = 2  # run after the loggers
    needs_logdir = True

    def on_train_end(self, trainer: Trainer) -> None:
        assert trainer.logdir is not None
        try:
            make_report(trainer.logdir)
        except (ImportError, OSError, ValueError) as error:
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
        ImportError: if plotly is not installed.
    """
    folder = Path(folder)
    plotly = import_extra("report.html", "plotly.offline", "callbacks")
    try:
        text = _page(folder.resolve().name, RunLog(folder), plotly.get_plotlyjs())
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} has a log that raysgd did not write: {error!r}.") from error
    path = folder / "report.html"
    with replacing(path) as file:
        file.write(text.encode(errors="replace"))  # JSON can contain half a surrogate pair
    return path


class RunLog:
    """The content of ``metrics.jsonl`` and ``events.jsonl``."""

    def __init__(self, folder: Path) -> None:
        path = folder / "metrics.jsonl"
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder} has no metrics.jsonl. Use the folder of a trainer: "
                "TorchTrainer(logdir=...)."
            )
        records, self.events = _records(path), _records(folder / "events.jsonl")
        self.runs = [record for record in records if record["kind"] == "run"]
        self.calls = [record for record in records if record["kind"] != "run"]
        times = [record["time"] for record in (*records, *self.events)]
        self.began: float = min(times, default=0.0)
        self.seconds: float = max(times, default=0.0) - self.began

    def calls_of(self, kind: str) -> list[Record]:
        """Return the calls of a kind without those that a later run repeated."""
        return [
            call
            for call in self.calls
            if call["kind"] == kind
            and not any(
                run["time"] > call["time"] and call["global_step"] > run["global_step"]
                for run in self.runs
            )
        ]

    def goodput(self) -> float:
        """Return the share of the duration that went into committed steps, from 0 to 1.

        This is the time in calls of ``train``, without stops (from a failure to the next
        generation, and pauses in which workers joined) and without repeated steps.
        """
        trains = [call for call in self.calls if call["kind"] == "train"]
        spans = [(call["time"] - call["seconds"], call["time"]) for call in trains]
        trained = sum(end - began for began, end in spans)
        trained -= sum(
            max(0.0, min(stop[1], end) - max(stop[0], began))
            for stop in self._stops()
            for began, end in spans
        )
        repeated = step = 0
        for record in sorted([*self.runs, *trains, *self.events], key=lambda each: each["time"]):
            reached = record["global_step"] if "global_step" in record else record["step"]
            if record["kind"] in ("run", "restarted"):
                repeated += max(0, step - reached)
            step = reached
        steps = max((call["global_step"] for call in trains), default=0)
        if self.seconds <= 0 or steps <= 0:
            return 0.0
        share: float = trained * steps / (steps + repeated) / self.seconds
        return min(1.0, max(0.0, share))

    def _stops(self) -> Iterator[tuple[float, float]]:
        """Yield the times when training stopped and continued. The spans do not overlap."""
        stopped_at, continued_at = math.inf, 0.0
        for event in self.events:
            if event["kind"] == "started":
                stopped_at = math.inf  # the time between two runs is not a stop
            elif event["kind"] in ("lost", "user_error"):
                stopped_at = min(stopped_at, event["time"])
            elif event["kind"] in ("resumed", "grown", "moved", "restarted"):
                began = min(stopped_at, event["time"] - event["seconds"])
                yield max(began, continued_at), event["time"]
                stopped_at, continued_at = math.inf, event["time"]


def _records(path: Path) -> list[Record]:
    """Return the lines of a log, without those whose writer was killed."""
    records = []
    lines = path.read_bytes().splitlines() if path.is_file() else ()
    for number, line in enumerate(filter(None, lines), start=1):
        try:
            records.append(json.loads(line))
        except ValueError:
            logger.warning("Skipped line %d of %s, which is incomplete.", number, path)
    return records


def _page(name: str, log: RunLog, script: str) -> str:
    run: Record = log.runs[-1] if log.runs else {}
    title = html.escape(f"{run['operator']}: {name}" if "operator" in run else name)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        # Add an empty icon, because the browser would request one.
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style><script>{script}</script>'
        f"<h1>{title}</h1>{_table(_figures(log, run))}{''.join(_sections(log, run))}</html>"
    )


def _figures(log: RunLog, run: Record) -> Iterator[tuple[str, Any, str]]:
    """Yield the name, the value, and a note for each key figure."""
    began = datetime.datetime.fromtimestamp(log.began).astimezone()
    versions = ", ".join(map(" ".join, run.get("versions", {}).items()))
    yield "start", f"{began:%A, %d %B %Y, %H:%M:%S %Z}", versions
    if "device" in run:
        yield "workers", run["num_workers"], f"at the start, with {run['device']}"
    yield "lost workers", sum(event["kind"] == "lost" for event in log.events), ""
    if shares := [event["shares"] for event in log.events if event.get("shares")]:
        yield "shares of the workers", "/".join(f"{share:.2g}" for share in shares[-1]), ""
    yield "duration", datetime.timedelta(seconds=round(log.seconds)), ""
    yield "goodput", f"{100 * log.goodput():.1f} %", "time in committed steps"
    if trains := log.calls_of("train"):
        yield "epochs", trains[-1]["epoch"], ""
        yield "steps", trains[-1]["global_step"], ""
    for kind, name, best_of in (
        ("train", "train_loss", min),
        ("validate", "val_loss", min),
        ("validate", "val_accuracy", max),
    ):
        points = [(value, call["epoch"]) for value, call in _values(log.calls_of(kind), name)]
        if points:
            best, epoch = best_of(points)
            yield f"last {name}", points[-1][0], f"best {_shown(best)}, in epoch {epoch}"


def _sections(log: RunLog, run: Record) -> Iterator[str]:
    yield from _metric_charts(log)
    speeds = [
        (call["time"] - log.began, samples / call["seconds"])
        for samples, call in _values(log.calls_of("train"), "num_samples")
        if call["seconds"] > 0
    ]
    if speeds:
        yield _chart("Samples per second", {"samples/s": speeds}, "seconds")
    if phases := _phases(log):
        yield _chart("Milliseconds per step", phases, "seconds", "hv", is_stacked=True)
    if log.events:
        sizes = [(event["time"] - log.began, event["num_workers"]) for event in log.events]
        yield _chart("Workers", {"workers": [*sizes, (log.seconds, sizes[-1][1])]}, "seconds", "hv")
        fields = ("kind", "ranks", "step", "seconds", "cause")
        rows = [
            (f"{event['time'] - log.began:.2f}", *(event[name] for name in fields))
            for event in log.events
        ]
        yield f"<h2>Events</h2>{_table(rows, ('time', *fields))}"
    if config := run.get("config"):
        yield f"<h2>Config</h2>{_table((name, f'{v!r:.200}') for name, v in config.items())}"


def _phases(log: RunLog) -> dict[str, list[tuple[float, float]]]:
    """Return the mean milliseconds per step of each phase over time."""
    calls = max(log.calls_of("step"), log.calls_of("train"), key=len)
    lines: dict[str, list[tuple[float, float]]] = {}
    for call in calls:
        end = call["time"] - log.began
        for phase in PHASES if "speed" in call else ():
            shown = 1000 * mean(call["speed"][f"{phase}_s"])
            lines.setdefault(phase, []).extend([(end - call["seconds"], shown), (end, shown)])
    return {name: points for name, points in lines.items() if any(y for _, y in points)}


def _table(rows: Iterable[Sequence[Any]], head: Sequence[str] = ()) -> str:
    names = "".join(f"<th>{name}</th>" for name in head)
    cells = ("".join(f"<td>{html.escape(_shown(cell))}</td>" for cell in row) for row in rows)
    return f"<table><tr>{names}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _metric_charts(log: RunLog) -> Iterator[str]:
    """Yield a chart for the losses, one for the accuracies, and one for each other group."""
    charts: dict[str, dict[str, list[tuple[float, float]]]] = {"Loss": {}, "Accuracy": {}}
    for kind in ("train", "validate", "step"):
        calls = log.calls_of(kind)
        for name in dict.fromkeys(name for call in calls for name in call["metrics"]):
            if name.startswith("last_") or name in _COUNTS:
                continue
            points = [(call["global_step"], value) for value, call in _values(calls, name)]
            if points:
                shown = f"{name}, by step" if kind == "step" else name
                charts.setdefault(_group_of(name), {})[shown] = points
    for title, lines in charts.items():
        if lines:
            yield _chart(title, lines, "step")


def _group_of(name: str) -> str:
    for part, title in (("loss", "Loss"), ("acc", "Accuracy")):
        if part in name:
            return title
    # Entries of one vector or dict share a chart: val_f1_0 and val_f1_1, profile/mean_fwd_s.
    whole = name.removeprefix("train_").removeprefix("val_").partition("/")[0]
    return re.sub(r"([-_]\d+)+$", "", whole) or name


def _chart(
    title: str,
    lines: dict[str, list[tuple[float, float]]],
    axis: str,
    shape: str = "linear",
    is_stacked: bool = False,
) -> str:
    from plotly.graph_objects import Figure

    figure = Figure()
    figure.update_layout(template="plotly_white", height=320, margin_t=24, showlegend=True)
    figure.update_xaxes(title_text=axis)
    for name, points in lines.items():
        x, y = zip(*points, strict=True)
        style = {"mode": "lines", "stackgroup": "all"} if is_stacked else {"mode": "lines+markers"}
        figure.add_scatter(x=x, y=y, name=html.escape(name), line_shape=shape, **style)
    drawing = figure.to_html(full_html=False, include_plotlyjs=False)
    return f"<h2>{html.escape(title)}</h2>{drawing}"


def _values(calls: Iterable[Record], name: str) -> Iterator[tuple[float, Record]]:
    """Yield the finite values of a metric with their calls."""
    for call in calls:
        value = call["metrics"].get(name)
        if isinstance(value, int | float) and abs(value) <= sys.float_info.max:
            yield value, call


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
