"""A page about a run, made from the logs in its folder."""

from __future__ import annotations

import datetime
import html
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from raysgd._internal.files import replacing
from raysgd._internal.imports import import_extra
from raysgd.callbacks.run_log import BREAKS, Record, RunLog, goodput, time_spent

__all__ = ["make_report"]

_Line = tuple[str, list[tuple[float, float]]]
"""A line of a chart: name and points."""
_COLORS = ("#3366cc", "#e07b39", "#2e9e6b", "#b04a8f", "#8a7a3b", "#5a6b7b")
_BREAK_COLOR = "#d33f49"
_COUNTS = ("epoch", "batch_count", "num_samples", "profile")
_GOOD = 0.95
"""Goodput above which the report gives no explanation."""
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


def make_report(folder: str | Path) -> Path:
    """Write ``report.html`` into a run folder, and return its path.

    The page needs ``plotly.min.js`` from the same folder, so copy both.

    Raises:
        FileNotFoundError: if the folder has no ``metrics.jsonl``.
        ValueError: if a line of its logs is not a record of a run.
        ImportError: if plotly is not installed.
    """
    folder = Path(folder)
    log = RunLog.read(folder)
    path = folder / "report.html"
    plotly = import_extra("report.html", "plotly.offline", "callbacks")
    library, script = folder / "plotly.min.js", plotly.get_plotlyjs().encode()
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
        f'<div class="tiles">{"".join(_tile(*tile) for tile in _tiles(log))}</div>'
        f"{''.join(_sections(log, run))}</body></html>"
    )


def _sections(log: RunLog, run: Record) -> Iterator[str]:
    if log.of("train") and goodput(log) <= _GOOD:
        yield _section(
            "Where the time went",
            _table(
                (name, f"{seconds:.1f} s", f"{100 * seconds / (log.ended - log.began):.1f} %")
                for name, seconds in time_spent(log).items()
            ),
            "<p>Goodput is the share of training: steps that count, from the first record of the "
            "run to the last.</p>",
        )
    yield from _metric_charts(log)
    yield from _speed_chart(log)
    yield from _worker_chart(log)
    yield _section("Calls", _call_table(log) if log.calls else "<p>No call has finished.</p>")
    if log.events:
        fields = ("kind", "ranks", "step", "seconds", "cause")
        rows = [
            [f"{event['time'] - log.began:.2f}", *(event[name] for name in fields)]
            for event in log.events
        ]
        yield _section("Events", _table(rows, ("time", *fields)))
    if config := run.get("config"):
        yield _section("Config", _table((name, f"{v!r:.200}") for name, v in config.items()))


def _made_with(run: Record) -> str:
    versions = run.get("versions", {})
    parts = [f"raysgd {run.get('version', '?')}", *(f"{name} {v}" for name, v in versions.items())]
    if "device" in run:
        parts.insert(0, f"{_count(run['num_workers'], 'worker')}, {run['device']}")
    return " · ".join(parts)


def _tiles(log: RunLog) -> Iterator[tuple[str, str, str]]:
    """Yield the id, the value, and the label of each figure at the top."""
    trains = log.of("train")
    num_lost = sum(event["kind"] == "lost" for event in log.events)
    yield "duration", str(datetime.timedelta(seconds=round(log.ended - log.began))), "duration"
    yield "goodput", f"{100 * goodput(log):.1f} %", "goodput"
    yield "lost-workers", str(num_lost), "lost workers"
    if trains:
        yield "epoch", str(trains[-1]["epoch"]), "epochs"
        yield "global-step", str(trains[-1]["global_step"]), "steps"
    for kind, name, label, best_of in (
        ("train", "train_loss", "training loss", min),
        ("validate", "val_loss", "validation loss", min),
        ("validate", "val_accuracy", "validation accuracy", max),
    ):
        found = [(value, call["epoch"]) for value, call in _values(log.kept(kind), name)]
        if found:
            best, epoch = best_of(found)
            yield name, _shown(found[-1][0]), f"{label}, last; best {_shown(best)}, epoch {epoch}"


def _tile(key: str, value: str, label: str) -> str:
    return (
        f'<div class="tile"><b id="{key}">{html.escape(value)}</b>'
        f"<span>{html.escape(label)}</span></div>"
    )


def _section(title: str, *content: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>{''.join(content)}</section>"


def _table(rows: Iterable[Sequence[Any]], head: Sequence[str] = ()) -> str:
    names = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    cells = ("".join(f"<td>{html.escape(_shown(cell))}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f"<table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>"


def _call_table(log: RunLog) -> str:
    names = dict.fromkeys(
        name
        for call in log.calls
        for name, value in call["metrics"].items()
        if not isinstance(value, list) and not name.startswith("last_") and name != "epoch"
    )
    fields = ("kind", "epoch", "global_step", "num_workers", "seconds")
    rows = [
        [*(call[name] for name in fields), *(call["metrics"].get(name, "") for name in names)]
        for call in log.calls
    ]
    return _table(rows, (*fields, *names))


def _metric_charts(log: RunLog) -> Iterator[str]:
    """Yield a chart for the losses, one for the accuracies, and one for each other group."""
    groups: dict[str, list[_Line]] = {"Loss": [], "Accuracy": []}
    for kind in ("train", "validate", "step"):
        calls = log.kept(kind)
        for name in dict.fromkeys(name for call in calls for name in call["metrics"]):
            if name.startswith("last_") or name in _COUNTS:
                continue
            points = [(call["global_step"], value) for value, call in _values(calls, name)]
            if points:
                shown = f"{name}, by step" if kind == "step" else name
                groups.setdefault(_group_of(name), []).append((shown, points))
    for title, lines in groups.items():
        if lines:
            yield _section(title, _lines_chart(lines, "step"))


def _group_of(name: str) -> str:
    for part, title in (("loss", "Loss"), ("acc", "Accuracy")):
        if part in name:
            return title
    # Entries of one vector or dict share a chart: val_f1_0 and val_f1_1, profile/mean_fwd_s.
    whole = name.removeprefix("train_").removeprefix("val_").partition("/")[0]
    return re.sub(r"[-_]\d+$", "", whole) or name


def _speed_chart(log: RunLog) -> Iterator[str]:
    points = [
        (call["time"] - log.began, samples / call["seconds"])
        for samples, call in _values(log.of("train"), "num_samples")
        if call["seconds"] > 0
    ]
    if points:
        yield _section("Samples per second", _lines_chart([("samples/s", points)], "seconds"))


def _worker_chart(log: RunLog) -> Iterator[str]:
    """Yield a chart of the number of workers over time, with markers for the events."""
    if not log.events:
        return
    import plotly.graph_objects as go

    line: list[tuple[float, int | None]] = []
    marks: dict[str, list[tuple[float, int, str]]] = {}
    for event in log.events:
        at, count = event["time"] - log.began, event["num_workers"]
        if event["kind"] == "started":
            line.append((at, None))  # a gap between two runs
        line.append((at, count))
        marks.setdefault(event["kind"], []).append((at, count, html.escape(_described(event))))
    line.append((log.ended - log.began, line[-1][1]))
    figure = go.Figure()
    figure.add_scatter(
        x=[x for x, _ in line],
        y=[y for _, y in line],
        mode="lines",
        line={"shape": "hv", "color": _COLORS[0], "width": 2},
        name="workers",
        hoverinfo="skip",
    )
    # Draw breaks last, because repairs at nearly the same time would hide them.
    for number, kind in enumerate(sorted(marks, key=BREAKS.__contains__)):
        is_break = kind in BREAKS
        color = _BREAK_COLOR if is_break else _COLORS[number % len(_COLORS)]
        figure.add_scatter(
            x=[x for x, _, _ in marks[kind]],
            y=[y for _, y, _ in marks[kind]],
            mode="markers",
            marker={"color": color, "size": 12, "symbol": "x" if is_break else "circle"},
            name=html.escape(kind),
            text=[text for _, _, text in marks[kind]],
            hovertemplate="%{text}<extra></extra>",
        )
    figure.update_yaxes(rangemode="tozero")
    yield _section("Workers", _drawn(figure, "seconds"))


def _described(event: Record) -> str:
    ranks = ", ".join(map(str, event["ranks"])) or "none"
    return f"{event['kind']}: workers {ranks}, step {event['step']}. {event['cause']}"


def _lines_chart(lines: Sequence[_Line], axis: str) -> str:
    import plotly.graph_objects as go

    figure = go.Figure()
    for index, (name, points) in enumerate(lines):
        figure.add_scatter(
            x=[x for x, _ in points],
            y=[y for _, y in points],
            name=html.escape(name),
            mode="lines+markers",
            line={"color": _COLORS[index % len(_COLORS)], "width": 2},
        )
    values = {y for _, points in lines for _, y in points}
    if len(values) == 1:  # plotly would draw an axis from 1 below the value to 1 above it
        (value,) = values
        margin = 0.05 * abs(value) or 0.05
        figure.update_yaxes(range=[value - margin, value + margin])
    return _drawn(figure, axis)


def _drawn(figure: Any, axis: str) -> str:
    figure.update_layout(
        template="plotly_white",
        height=320,
        margin={"l": 56, "r": 16, "t": 8, "b": 44},
        legend={"orientation": "h", "y": 1.12, "x": 0},
        showlegend=True,
    )
    figure.update_xaxes(title=axis)
    drawing: str = figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        config={"displayModeBar": False, "responsive": True},
    )
    return drawing


def _values(calls: Iterable[Record], name: str) -> Iterator[tuple[float, Record]]:
    """Yield the finite values of a metric with their calls."""
    for call in calls:
        value = call["metrics"].get(name)
        if isinstance(value, int | float) and abs(value) <= sys.float_info.max:
            yield value, call


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
