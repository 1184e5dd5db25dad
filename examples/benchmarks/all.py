"""Run all benchmarks, one after the other, and write what they show into one folder.

    python examples/benchmarks/all.py
    python examples/benchmarks/all.py --folder results --only epoch start
    python examples/benchmarks/all.py --smoke-test

The folder gets a JSON file a benchmark, ``results.md``, the table of the documentation, and
``results.html``, a drawing of the epochs and the starts. Let nothing else run meanwhile: the load
of the machine before and after is in the table.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

FOLDER = Path(__file__).parent


def run(name, folder, smoke_test):
    """Run a benchmark and return its result."""
    path = folder / f"{name}.json"
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--json", str(path)]
    print(f"\n==== {name}", flush=True)
    subprocess.run(command + ["--smoke-test"] * smoke_test, check=True)
    return json.loads(path.read_text())


def ms(figure):
    return f"{1e3 * figure['median']:.1f} ({1e3 * figure['min']:.1f} to {1e3 * figure['max']:.1f})"


def ratio(figure):
    return f"{figure['median']:.2f} ({figure['min']:.2f} to {figure['max']:.2f})"


def epoch_rows(result):
    for workload, sides in result["epoch"].items():
        for side, row in sides.items():
            yield f"epoch of {workload}, {side}, raw DDP = 1", ratio(row["ratio"])


def start_rows(result):
    for side, row in result["start"].items():
        yield f"start to first step, {side}, raw DDP = 1", ratio(row["ratio"])


def calls_rows(result):
    for floats, row in result["floats"].items():
        yield f"`train(num_steps=1)` beyond its step, {int(floats):,} floats, ms", ms(row)
    for workers, row in result["workers"].items():
        yield f"a call that does nothing, {workers} workers, ms", ms(row["call"])


def recovery_rows(result):
    for moment, sizes in result["loss"].items():
        for size, row in sizes.items():
            yield f"loss of one of {size} ({moment}) to the next step, ms", ms(row["next_step_s"])
            yield f"loss of one of {size} ({moment}) to full size, ms", ms(row["full_size_s"])
            yield f"loss of one of {size} ({moment}), steps redone", str(row["redone"]["max"])
    for size, row in result["growth"].items():
        yield f"growth to {size}, pause, ms", ms(row["growth_pause_s"])


def saving_rows(result):
    added = sorted(100 * (pair["ratio"] - 1) for pair in result["pairs"])
    middle = added[len(added) // 2]
    yield (
        "a save that does not block, time added to training, %",
        f"{middle:.1f} ({added[0]:.1f} to {added[-1]:.1f})",
    )


def report_rows(result):
    yield "`raysgd.train.report()` beyond the slowest worker's work, ms", ms(result["report"])


ROWS = {
    "epoch": epoch_rows,
    "start": start_rows,
    "calls": calls_rows,
    "recovery": recovery_rows,
    "saving": saving_rows,
    "report": report_rows,
}


def table(results, load):
    """Return the results as a page of Markdown."""
    head = (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, Python "
        f"{platform.python_version()}, {time.strftime('%Y-%m-%d')}; load {load[0]:.1f} before and "
        f"{load[1]:.1f} after. Median (fastest to slowest)."
    )
    lines = [head, "", "| what | figure |", "|---|---|"]
    for name, result in results.items():
        lines += [f"| {what} | {figure} |" for what, figure in ROWS[name](result)]
    return "\n".join(lines) + "\n"


def drawing(results):
    """Return a figure with a bar a side, for epochs and for starts."""
    panels = {f"epoch of {name}": sides for name, sides in results["epoch"]["epoch"].items()}
    if "start" in results:
        panels["start to first step"] = results["start"]["start"]
    figure = make_subplots(rows=1, cols=len(panels), subplot_titles=list(panels))
    for column, sides in enumerate(panels.values(), start=1):
        ratios = [row["ratio"] for row in sides.values()]
        middle = [ratio["median"] for ratio in ratios]
        figure.add_trace(
            go.Bar(
                x=list(sides),
                y=middle,
                marker_color=["#e4572e" if side == "raysgd" else "#8da0b3" for side in sides],
                error_y={
                    "array": [r["max"] - r["median"] for r in ratios],
                    "arrayminus": [r["median"] - r["min"] for r in ratios],
                },
            ),
            row=1,
            col=column,
        )
        figure.add_hline(y=1, line_dash="dot", row=1, col=column)
    figure.update_layout(showlegend=False, title="Time, as a multiple of hand-written DDP's")
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("benchmark_results"))
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--smoke-test", action="store_true", help="a look at each")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    before = os.getloadavg()[0]
    results = {name: run(name, args.folder, args.smoke_test) for name in args.only}
    page = table(results, (before, os.getloadavg()[0]))
    (args.folder / "results.md").write_text(page)
    if "epoch" in results:
        drawing(results).write_html(args.folder / "results.html", include_plotlyjs=True)
    print(f"\n{page}\nin {args.folder.resolve()}")


if __name__ == "__main__":
    main()
