"""A page about a run, made from the logs in its folder."""

from __future__ import annotations

import datetime
import html
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from raysgd._internal.files import replacing
from raysgd._internal.imports import import_extra
from raysgd.callbacks.run_log import BREAKS, Record, RunLog, goodput, time_spent

__all__ = ["make_report"]

_Line = tuple[str, list[tuple[float, float]]]
"""What is drawn as one line: its name, and its points."""
_COLORS = ("#3366cc", "#e07b39", "#2e9e6b", "#b04a8f", "#8a7a3b", "#5a6b7b")
_EVENT_COLORS = {
    "lost": "#d33f49",
    "hung": "#d33f49",
    "split": "#b04a8f",
    "user_error": "#8f3fd3",
    "resumed": "#e0a339",
    "grown": "#2e9e6b",
    "moved": "#2e9e6b",
    "draining": "#8a8f98",
    "restarted": "#e07b39",
    "waiting": "#8a8f98",
    "newcomer_failed": "#d37f3f",
    "started": "#3366cc",
}
_GOOD = 0.95
"""Goodput that needs no explanation."""
_LEAST_S = 0.05
_LARGE, _HUGE = 1e4, 1e15
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
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid #eceef2; }
th { color: #5b6472; font-weight: 500; } .text { text-align: left; }
p { margin: .5rem 0 0; color: #5b6472; font-size: .86rem; }
"""


def make_report(folder: str | Path) -> Path:
    """Write ``report.html`` into the folder of a run, and return its path.

    What draws its charts, ``plotly.min.js``, is beside it: give both away.

    Raises:
        FileNotFoundError: if the folder has no ``metrics.jsonl``.
        ValueError: if a record in its logs cannot be one of a run.
        ImportError: if plotly is not installed.
    """
    folder = Path(folder)
    log = RunLog.read(folder)
    path = folder / "report.html"
    plotly = import_extra("report.html", "plotly.offline", "callbacks")
    library, script = folder / "plotly.min.js", plotly.get_plotlyjs().encode()
    text = _page(folder.resolve().name, log, f'<script src="{library.name}"></script>')
    with replacing(path) as file:
        # of half a character, which JSON can name, there is no other half to be found
        file.write(text.encode(errors="replace"))
    if not library.exists() or library.stat().st_size != len(script):
        with replacing(library) as file:
            file.write(script)
    return path


# ---- the page


def _page(name: str, log: RunLog, script: str) -> str:
    began = datetime.datetime.fromtimestamp(log.began).astimezone()
    run: Record = log.runs[-1] if log.runs else {}
    operator = run.get("operator")
    title = html.escape(f"{operator}: {name}" if isinstance(operator, str) else name)
    charts = f"{_metric_charts(log)}{_speed_chart(log)}{_worker_chart(log)}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title>'
        # the browser would ask a server for one otherwise
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style>{script}</head><body>'
        f"<h1>{title}</h1>"
        f'<p class="when">{began:%A, %d %B %Y, %H:%M:%S %Z} · {html.escape(_made_with(run))}</p>'
        f'<div class="tiles">{"".join(_tile(*tile) for tile in _tiles(log))}</div>'
        f"{_time_table(log)}{charts}{_epoch_table(log)}{_event_table(log)}{_config_table(run)}"
        "</body></html>"
    )


def _made_with(run: Record) -> str:
    versions = run.get("versions")
    named = versions.items() if isinstance(versions, dict) else ()
    parts = [f"raysgd {run.get('version', '?')}", *(f"{name} {value}" for name, value in named)]
    if isinstance(device := run.get("device"), str):
        num_workers = run.get("num_workers", "?")
        parts.insert(0, f"{num_workers} worker{'s' * (num_workers != 1)}, {device}")
    return " · ".join(parts)


def _config_table(run: Record) -> str:
    config = run.get("config")
    if not isinstance(config, dict) or not config:
        return ""
    rows = "".join(
        f'<tr><td class="text">{html.escape(str(name))}</td>'
        f'<td class="text">{html.escape(f"{value!r:.200}")}</td></tr>'
        for name, value in config.items()
    )
    return _section("Config", f'<table id="config"><tbody>{rows}</tbody></table>')


def _time_table(log: RunLog) -> str:
    """Say where the time went that was not spent on training."""
    if not log.of("train") or log.ended <= log.began or goodput(log) > _GOOD:
        return ""
    rows = "".join(
        f'<tr><td class="text">{html.escape(name)}</td><td>{seconds:.1f} s</td>'
        f"<td>{100 * seconds / (log.ended - log.began):.1f} %</td></tr>"
        for name, seconds in time_spent(log).items()
        if seconds >= _LEAST_S
    )
    return _section(
        "Where the time went",
        f'<table id="time"><tbody>{rows}</tbody></table>',
        "<p>Goodput is the share of training: steps that count, from the first record of the run "
        "to the last.</p>",
    )


def _tiles(log: RunLog) -> Iterator[tuple[str, str, str]]:
    trains, validations = log.of("train"), log.of("validate")
    losses = sum(event["kind"] == "lost" for event in log.events)
    yield "duration", _duration(log.ended - log.began), "duration"
    yield "goodput", f"{100 * goodput(log):.1f} %", "goodput"
    yield "lost-workers", str(losses), f"worker{'s' * (losses != 1)} lost"
    if trains:
        epoch, step = trains[-1]["epoch"], trains[-1]["global_step"]
        yield "epoch", str(epoch), f"epoch{'s' * (epoch != 1)}"
        yield "global-step", str(step), f"step{'s' * (step != 1)}"
    for kind, key, label, best_of in (
        ("train", "train_loss", "training loss", min),
        ("validate", "val_loss", "validation loss", min),
        ("validate", "val_accuracy", "validation accuracy", max),
    ):
        calls = trains if kind == "train" else validations
        values = [value for c in calls if (value := _number(c["metrics"].get(key))) is not None]
        kept = [
            (value, call["epoch"])
            for call in log.kept(kind)
            if (value := _number(call["metrics"].get(key))) is not None
        ]
        if values and kept:
            best, epoch = best_of(kept, key=lambda pair: pair[0])
            yield (
                key,
                _format_number(values[-1]),
                f"{label}, last; best {_format_number(best)}, epoch {epoch}",
            )


def _tile(key: str, value: str, label: str) -> str:
    return (
        f'<div class="tile"><b id="{html.escape(key)}">{html.escape(value)}</b>'
        f"<span>{html.escape(label)}</span></div>"
    )


def _section(title: str, *content: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>{''.join(content)}</section>"


def _metric_charts(log: RunLog) -> str:
    """Draw the losses, the accuracies, and every other mean that a batch gave."""
    groups: dict[str, list[_Line]] = {}
    for kind in ("train", "validate", "step"):
        calls = log.kept(kind)
        for name in dict.fromkeys(name for call in calls for name in call["metrics"]):
            if name.startswith("last_") or name in ("epoch", "batch_count", "num_samples"):
                continue
            points = [
                (float(call["global_step"]), value)
                for call in calls
                if (value := _number(call["metrics"].get(name))) is not None
            ]
            if points:
                shown = f"{name}, by the step" if kind == "step" else name
                groups.setdefault(_group_of(name), []).append((shown, points))
    first = [title for title in ("Loss", "Accuracy") if title in groups]
    titles = [*first, *(title for title in groups if title not in first)]
    return "".join(_section(title, _lines_chart(groups[title], "step")) for title in titles)


def _group_of(name: str) -> str:
    for sign, title in (("loss", "Loss"), ("acc", "Accuracy")):
        if sign in name:
            return title
    # the entries of one vector or dict share a drawing: val_f1_0 and val_f1_1, profile/mean_fwd_s
    whole = name.removeprefix("train_").removeprefix("val_").partition("/")[0]
    return re.sub(r"[-_]\d+$", "", whole) or name


def _speed_chart(log: RunLog) -> str:
    points = [
        ((call["time"] - log.began), samples / call["seconds"])
        for call in log.of("train")
        if (samples := _number(call["metrics"].get("num_samples"))) and call["seconds"] > 0
    ]
    if not points:
        return ""
    drawing = _lines_chart([("samples/s", points)], "seconds since the start", from_zero=True)
    return _section("Samples a second", drawing, "<p>Samples of a train call by its wall time.</p>")


def _worker_chart(log: RunLog) -> str:
    """Draw the number of workers over time, with each loss and resize marked."""
    if not log.events:
        return ""
    import plotly.graph_objects as go

    xs = [event["time"] - log.began for event in log.events]
    ys = [event.get("num_workers", len(event["ranks"])) for event in log.events]
    figure = go.Figure()
    line_xs, line_ys = _worker_line(log, xs, ys)
    figure.add_scatter(
        x=line_xs,
        y=line_ys,
        mode="lines",
        line={"shape": "hv", "color": _COLORS[0], "width": 2},
        fill="tozeroy",
        fillcolor="rgba(51,102,204,.08)",
        name="workers",
        hoverinfo="skip",
    )
    kinds = dict.fromkeys(event["kind"] for event in log.events)
    # breaks last: what mends them comes at nearly the same time, and would hide them
    for kind in sorted(kinds, key=BREAKS.__contains__):
        of_kind = [i for i, event in enumerate(log.events) if event["kind"] == kind]
        figure.add_scatter(
            x=[xs[i] for i in of_kind],
            y=[ys[i] for i in of_kind],
            mode="markers",
            marker={
                "color": _EVENT_COLORS.get(kind, "#5a6b7b"),
                "size": 13 if kind in BREAKS else 9,
                "symbol": "x" if kind in BREAKS else "circle",
                "line": {"color": "#fff", "width": 1},
            },
            name=html.escape(kind),
            text=[_described(log.events[i]) for i in of_kind],
            hovertemplate="%{text}<extra></extra>",
        )
    figure.update_yaxes(rangemode="tozero", dtick=1 if max(ys) <= 12 else None)
    return _section("Workers", _drawn(figure, "seconds since the start"))


def _worker_line(
    log: RunLog, xs: Sequence[float], ys: Sequence[int]
) -> tuple[list[float], list[int | None]]:
    """Return the line of workers over time, with a gap where no run was under way."""
    line: list[tuple[float, int | None]] = []
    for x, y, event in zip(xs, ys, log.events, strict=True):
        if event["kind"] == "started" and line:
            last = max(
                (e["time"] for e in (*log.calls, *log.events) if e["time"] < event["time"]),
                default=event["time"],
            )
            line += [(last - log.began, line[-1][1]), (last - log.began, None)]
        line.append((x, y))
    line.append((log.ended - log.began, line[-1][1]))
    return [x for x, _ in line], [y for _, y in line]


def _described(event: Record) -> str:
    ranks = ", ".join(map(str, event["ranks"])) or "none"
    words = f"{event['kind']}: workers {ranks}, step {event['step']}"
    if event["seconds"]:
        words += f", {event['seconds']:.2f} s"
    return html.escape(f"{words} {event['cause']}".strip())


def _lines_chart(lines: Sequence[_Line], axis: str, from_zero: bool = False) -> str:
    import plotly.graph_objects as go

    figure = go.Figure()
    for index, (name, points) in enumerate(lines):
        color = _COLORS[index % len(_COLORS)]
        figure.add_scatter(
            x=[x for x, _ in points],
            y=[y for _, y in points],
            name=html.escape(name),
            mode="lines+markers",
            line={"color": color, "width": 2},
            marker={"size": 6},
        )
    values = {y for _, points in lines for _, y in points}
    if from_zero:
        figure.update_yaxes(rangemode="tozero")
    elif len(values) == 1:  # plotly would draw one value on an axis from 1 below it to 1 above
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
        font={"family": "system-ui, sans-serif", "size": 12, "color": "#1d2430"},
        hovermode="closest",
    )
    figure.update_xaxes(title=axis)
    drawing: str = figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        config={"displayModeBar": False, "responsive": True},
    )
    return drawing


def _epoch_table(log: RunLog) -> str:
    if not log.calls:
        return _section("Calls", "<p>No call was finished.</p>")
    names = [
        name
        for name in dict.fromkeys(
            name
            for call in log.calls
            for name, value in call["metrics"].items()
            if not isinstance(value, list)
        )
        if not name.startswith("last_") and name not in ("epoch", "profile")
    ]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    is_split = any(call.get("split", 1) != 1 for call in log.calls)
    rows = "".join(
        f'<tr><td class="text">{html.escape(call["kind"])}</td><td>{call["epoch"]}</td>'
        f"<td>{call['global_step']}</td><td>{call['num_workers']}</td>"
        f"<td>{call['seconds']:.2f}</td>"
        + (f"<td>{_cell(call.get('split', 1))}</td>" if is_split else "")
        + "".join(f"<td>{_cell(call['metrics'].get(name))}</td>" for name in names)
        + "</tr>"
        for call in log.calls
    )
    return _section(
        "Calls",
        '<table id="calls"><thead><tr><th class="text">call</th><th>epoch</th><th>step</th>'
        f"<th>workers</th><th>seconds</th>{'<th>parts</th>' * is_split}{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table>",
    )


def _event_table(log: RunLog) -> str:
    if not log.events:
        return ""
    rows = "".join(
        f"<tr><td>{event['time'] - log.began:.2f}</td>"
        f'<td class="text">{html.escape(event["kind"])}</td>'
        f"<td>{html.escape(', '.join(map(str, event['ranks'])))}</td><td>{event['step']}</td>"
        f"<td>{event['seconds']:.2f}</td>"
        f'<td class="text">{html.escape(event["cause"])}</td></tr>'
        for event in log.events
    )
    return (
        '<section><h2>Events</h2><table id="events"><thead><tr><th>time</th>'
        '<th class="text">event</th><th>ranks</th><th>step</th><th>seconds</th>'
        f'<th class="text">cause</th></tr></thead><tbody>{rows}</tbody></table></section>'
    )


# ---- values


def _number(value: Any) -> float | None:
    """Return a finite number; None for anything else, which cannot be drawn."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return _format_number(value) if isinstance(value, int | float) else html.escape(str(value))


def _format_number(value: float) -> str:
    """Return a number as all of the page are shown: with four digits that count."""
    if isinstance(value, int) or not _LARGE <= abs(value) < _HUGE:
        return str(value) if isinstance(value, int) else f"{value:.4g}"
    return f"{value:.0f}"


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    minutes, left = divmod(rest, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {left} s" if minutes else f"{seconds:.1f} s"
