"""A page about a run, written from the logs in its folder."""

from __future__ import annotations

import datetime
import html
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from raysgd._internal.files import replacing
from raysgd._internal.imports import import_extra
from raysgd.callbacks.base import Callback, Trainer
from raysgd.callbacks.run_log import BREAKS, Record, RunLog, goodput, time_spent

logger = logging.getLogger(__name__)

_COLORS = ("#3366cc", "#e07b39", "#2e9e6b", "#b04a8f", "#8a7a3b", "#5a6b7b")
_BREAK_COLOR = "#d33f49"
_COUNTS = ("epoch", "batch_count", "num_samples", "profile")
_STYLE = """
:root { color-scheme: light; font-family: system-ui, sans-serif; color: #1d2430; }
body { margin: 0 auto; padding: 2rem 1.5rem 4rem; max-width: 72rem; background: #f6f7f9; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.05rem; margin: 0 0 .75rem; }
.when { color: #5b6472; margin: 0 0 1.5rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .75rem; }
.tile, section { background: #fff; border: 1px solid #e3e6eb; border-radius: .6rem; }
.tile { padding: .8rem 1rem; } .tile b { display: block; font-size: 1.35rem; font-weight: 600; }
.tile span { color: #5b6472; font-size: .82rem; }
section { padding: 1rem 1.25rem; margin-top: 1rem; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .86rem; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #eceef2; }
th { color: #5b6472; font-weight: 500; }
p { margin: .5rem 0 0; color: #5b6472; font-size: .86rem; }
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

    The page needs ``plotly.min.js`` from the same folder. If you copy the page, copy this file too.

    Raises:
        FileNotFoundError: if the folder has no ``metrics.jsonl``.
        ValueError: if a line of its logs is not a record of a run.
        ImportError: if plotly is not installed.
    """
    folder = Path(folder)
    log = RunLog.read(folder)
    plotly = import_extra("report.html", "plotly.offline", "callbacks")
    script = plotly.get_plotlyjs().encode()
    path, library = folder / "report.html", folder / "plotly.min.js"
    text = _page(folder.resolve().name, log, f'<script src="{library.name}"></script>')
    with replacing(path) as file:
        file.write(text.encode(errors="replace"))  # JSON can contain half a surrogate pair
    if not library.exists() or library.stat().st_size != len(script):
        with replacing(library) as file:
            file.write(script)
    return path


def _page(name: str, log: RunLog, script: str) -> str:
    began = datetime.datetime.fromtimestamp(log.began).astimezone()
    run: Record = log.runs[-1] if log.runs else {}
    title = html.escape(f"{run['operator']}: {name}" if "operator" in run else name)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title>'
        # Add an empty icon, because the browser would request one.
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style>{script}</head><body>'
        f"<h1>{title}</h1>"
        f'<p class="when">{began:%A, %d %B %Y, %H:%M:%S %Z} · {html.escape(_made_with(run))}</p>'
        f'<div class="tiles">{"".join(_tiles(log))}</div>{"".join(_sections(log, run))}'
        "</body></html>"
    )


def _made_with(run: Record) -> str:
    parts = [f"raysgd {run.get('version', '?')}"]
    if "device" in run:
        count = run["num_workers"]
        parts.insert(0, f"{count} worker{'s' * (count != 1)}, {run['device']}")
    return " · ".join(parts + [f"{k} {v}" for k, v in run.get("versions", {}).items()])


def _tiles(log: RunLog) -> Iterator[str]:
    """Yield the key figures at the top of the page."""
    trains = log.of("train")
    num_lost = sum(event["kind"] == "lost" for event in log.events)
    yield _tile("duration", datetime.timedelta(seconds=round(log.ended - log.began)), "duration")
    yield _tile("goodput", f"{100 * goodput(log):.1f} %", "goodput")
    yield _tile("lost-workers", num_lost, "lost workers")
    if shares := [event["shares"] for event in log.events if event["kind"] == "rebalanced"]:
        text = ", ".join(f"{share:.2f}" for share in shares[-1])
        yield _tile("shares", text, "last shares of the workers")
    if trains:
        yield _tile("epoch", trains[-1]["epoch"], "epochs")
        yield _tile("global-step", trains[-1]["global_step"], "steps")
    for kind, name, label, best_of in (
        ("train", "train_loss", "training loss", min),
        ("validate", "val_loss", "validation loss", min),
        ("validate", "val_accuracy", "validation accuracy", max),
    ):
        found = [(value, call["epoch"]) for value, call in _values(log.kept(kind), name)]
        if found:
            best, epoch = best_of(found)
            yield _tile(name, found[-1][0], f"{label}, last; best {_shown(best)}, epoch {epoch}")


def _tile(key: str, value: Any, label: str) -> str:
    text = html.escape(_shown(value))
    return f'<div class="tile"><b id="{key}">{text}</b><span>{html.escape(label)}</span></div>'


def _sections(log: RunLog, run: Record) -> Iterator[str]:
    if duration := log.ended - log.began:
        rows = [
            (name, f"{seconds:.1f} s", f"{100 * seconds / duration:.1f} %")
            for name, seconds in time_spent(log).items()
        ]
        note = "<p>Goodput is the share of the whole duration that went into steps that count.</p>"
        yield _section("Where the time went", _table(rows) + note)
    yield from _metric_charts(log)
    speeds = [
        (call["time"] - log.began, samples / call["seconds"])
        for samples, call in _values(log.of("train"), "num_samples")
        if call["seconds"] > 0
    ]
    if speeds:
        yield _lines_chart("Samples per second", {"samples/s": speeds}, "seconds")
    if log.events:
        yield _worker_chart(log)
        fields = ("kind", "ranks", "step", "seconds", "cause")
        rows = [
            (f"{event['time'] - log.began:.2f}", *(event[name] for name in fields))
            for event in log.events
        ]
        yield _section("Events", _table(rows, ("time", *fields)))
    if config := run.get("config"):
        yield _section("Config", _table((name, f"{v!r:.200}") for name, v in config.items()))


def _section(title: str, content: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>{content}</section>"


def _table(rows: Iterable[Sequence[Any]], head: Sequence[str] = ()) -> str:
    names = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    cells = ("".join(f"<td>{html.escape(_shown(cell))}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f"<table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>"


def _metric_charts(log: RunLog) -> Iterator[str]:
    """Yield a chart for the losses, one for the accuracies, and one for each other group."""
    charts: dict[str, dict[str, list[tuple[float, float]]]] = {"Loss": {}, "Accuracy": {}}
    for kind in ("train", "validate", "step"):
        calls = log.kept(kind)
        for name in dict.fromkeys(name for call in calls for name in call["metrics"]):
            if name.startswith("last_") or name in _COUNTS:
                continue
            points = [(call["global_step"], value) for value, call in _values(calls, name)]
            if points:
                shown = f"{name}, by step" if kind == "step" else name
                charts.setdefault(_group_of(name), {})[shown] = points
    for title, lines in charts.items():
        if lines:
            yield _lines_chart(title, lines, "step")


def _group_of(name: str) -> str:
    for part, title in (("loss", "Loss"), ("acc", "Accuracy")):
        if part in name:
            return title
    # Entries of one vector or dict share a chart: val_f1_0 and val_f1_1, profile/mean_fwd_s.
    whole = name.removeprefix("train_").removeprefix("val_").partition("/")[0]
    return re.sub(r"[-_]\d+$", "", whole) or name


def _worker_chart(log: RunLog) -> str:
    """Return a chart of the number of workers over time, with a marker for each event."""
    points: list[tuple[float, int | None, str, str]] = []
    for event in log.events:
        at, kind = event["time"] - log.began, event["kind"]
        if kind == "started":
            points.append((at, None, "", _COLORS[0]))  # a gap between two runs
        ranks = ", ".join(map(str, event["ranks"])) or "none"
        text = f"{kind}: workers {ranks}, step {event['step']}. {event['cause']}"
        color = _BREAK_COLOR if kind in BREAKS else _COLORS[0]
        points.append((at, event["num_workers"], html.escape(text), color))
    points.append((log.ended - log.began, points[-1][1], "end of the log", _COLORS[0]))
    x, y, texts, colors = zip(*points, strict=True)
    trace = {
        "x": x,
        "y": y,
        "text": texts,
        "hovertemplate": "%{text}<extra></extra>",
        "name": "workers",
        "mode": "lines+markers",
        "line": {"shape": "hv", "color": _COLORS[0], "width": 2},
        "marker": {"color": colors, "size": 10},
    }
    return _chart("Workers", [trace], "seconds", {"rangemode": "tozero"})


def _lines_chart(title: str, lines: dict[str, list[tuple[float, float]]], axis: str) -> str:
    traces = [
        {
            "name": html.escape(name),
            "x": [x for x, _ in points],
            "y": [y for _, y in points],
            "mode": "lines+markers",
            "line": {"color": _COLORS[index % len(_COLORS)], "width": 2},
        }
        for index, (name, points) in enumerate(lines.items())
    ]
    y_axis = {}
    values = {y for points in lines.values() for _, y in points}
    if len(values) == 1:  # plotly would draw an axis from 1 below the value to 1 above it
        (value,) = values
        margin = 0.05 * abs(value) or 0.05
        y_axis["range"] = [value - margin, value + margin]
    return _chart(title, traces, axis, y_axis)


def _chart(title: str, traces: list[Any], axis: str, y_axis: dict[str, Any]) -> str:
    import plotly.io

    layout = {
        "template": "plotly_white",
        "height": 320,
        "margin": {"l": 56, "r": 16, "t": 8, "b": 44},
        "legend": {"orientation": "h", "y": 1.12, "x": 0},
        "showlegend": True,
        "xaxis": {"title": {"text": axis}},
        "yaxis": y_axis,
    }
    drawing = plotly.io.to_html(
        {"data": traces, "layout": layout},
        full_html=False,
        include_plotlyjs=False,
        config={"displayModeBar": False, "responsive": True},
    )
    return _section(title, drawing)


def _values(calls: Iterable[Record], name: str) -> Iterator[tuple[float, Record]]:
    """Yield the finite values of a metric with their calls."""
    for call in calls:
        value = call["metrics"].get(name)
        if isinstance(value, int | float) and abs(value) <= sys.float_info.max:
            yield value, call


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
