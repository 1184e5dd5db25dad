"""Run all benchmarks one after the other, and write their results to a folder.

    python examples/benchmarks/all.py
    python examples/benchmarks/all.py --folder results --only epoch start
    python examples/benchmarks/all.py --smoke-test

``--only`` runs some benchmarks again and takes the other results from the folder. The folder gets a
JSON file per benchmark, the table of the documentation (``results.md``), and drawings:
``peers.svg`` (epochs and starts of all sides) and ``scale.svg``. Use an idle machine. The table
contains the load before and after.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

FOLDER = Path(__file__).parent
OURS, OTHERS = "#e4572e", "#8da0b3"


def run(name, folder, smoke_test):
    path = _result_of(name, folder)
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--json", str(path)]
    print(f"\n==== {name}", flush=True)
    subprocess.run(command + ["--smoke-test"] * smoke_test, check=True)


def _result_of(name, folder):
    return folder / f"{name}.json"


def ms(figure):
    return [f"{1e3 * figure[part]:.1f}" for part in ("median", "min", "max")]


def ratio(figure):
    return f"{figure['median']:.2f} ({figure['min']:.2f} to {figure['max']:.2f})"


def epoch_rows(result):
    for workload, sides in result["epoch"].items():
        yield f"epoch of {workload}", {side: ratio(row["ratio"]) for side, row in sides.items()}


def start_rows(result):
    sides = result["start"]
    yield "start to first step", {side: ratio(row["ratio"]) for side, row in sides.items()}


def calls_rows(result):
    for floats, row in result["floats"].items():
        yield f"`train(num_steps=1)` beyond its step, {int(floats):,} floats, ms", ms(row)
    for floats, row in result.get("buffers", {}).items():
        yield f"`train(num_steps=1)` with its step, {int(floats):,} floats in a buffer, ms", ms(row)


def scale_rows(result):
    for workers, row in result["workers"].items():
        yield f"a call that does nothing, {workers} workers, ms", ms(row["call"])
        yield f"the same of as many empty Ray actors, {workers} workers, ms", ms(row["ray"])
    for workers, row in result["workers"].items():
        for size, part in (("small", row), ("large", row.get("large", {}))):
            if "join" in part:
                floats = f"{result['floats'][size]:,} floats"
                yield (
                    f"a replacement worker joins, {workers} workers, {floats}, ms",
                    ms(part["join"]),
                )


def recovery_rows(result):
    for moment, sizes in result["loss"].items():
        for size, row in sizes.items():
            yield f"loss of one of {size} ({moment}) to the next step, ms", ms(row["next_step_s"])
            yield f"loss of one of {size} ({moment}) to full size, ms", ms(row["full_size_s"])
            redone = [str(row["redone"][part]) for part in ("median", "min", "max")]
            yield f"loss of one of {size} ({moment}), steps redone", redone
    for size, row in result["growth"].items():
        yield f"growth to {size}, pause, ms", ms(row["growth_pause_s"])
    for size, row in result.get("move", {}).items():
        yield f"one of {size} moves, pause, ms", ms(row["pause_s"])
    for side, faults in result.get("hosts", {}).items():
        for fault, row in faults.items():
            yield f"a host: {fault}, standstill, {side}, ms", ms(row["standstill_s"])
            redone = [str(row["redone"][part]) for part in ("median", "min", "max")]
            yield f"a host: {fault}, steps redone, {side}", redone


def saving_rows(result):
    added = sorted(100 * (pair["ratio"] - 1) for pair in result["pairs"])
    figures = (statistics.median(added), added[0], added[-1])
    cells = [f"{figure:.1f}" for figure in figures]
    yield "a save that does not block, time added to training, %", cells


def fidelity_rows(result):
    cells = [f"{result['ratio'][part]:.2f}" for part in ("median", "min", "max")]
    yield "epoch of resnet on three workers that were four, four = 1", cells


def report_rows(result):
    yield "`raysgd.train.report()` beyond the slowest worker's work, ms", ms(result["report"])


def sharding_rows(result):
    workers = result["workers"]
    for side, row in result["epoch"].items():
        what = f"epoch of resnet by AdamW, {workers} workers, {side}, not divided = 1"
        yield what, [f"{row[part]:.2f}" for part in ("median", "min", "max")]
    what, row = f"the same, {workers} workers, one copy, no copy = 1", result["copy"]
    yield what, [f"{row[part]:.2f}" for part in ("median", "min", "max")]
    for side, row in result["memory"].items():
        what = f"most memory of a worker, {result['floats']['memory']:,} floats, {side}, MiB"
        yield what, [f"{row[part] / 2**20:.0f}" for part in ("median", "min", "max")]
    for side, row in result["state"].items():
        what = f"AdamW's state on a worker, {result['floats']['memory']:,} floats, {side}, MiB"
        yield what, [f"{row[part] / 2**20:.0f}" for part in ("median", "min", "max")]
    for side, row in result["next_step_s"].items():
        what = f"loss to the next step, {result['floats']['next_step']:,} floats, {side}, ms"
        yield what, ms(row)


PEERS = {"epoch": epoch_rows, "start": start_rows}
OWN = {
    "calls": calls_rows,
    "scale": scale_rows,
    "recovery": recovery_rows,
    "saving": saving_rows,
    "fidelity": fidelity_rows,
    "report": report_rows,
    "sharding": sharding_rows,
}
ROWS = PEERS | OWN


def table(results, load):
    """Return the results as a Markdown page."""
    head = (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, Python "
        f"{platform.python_version()}, {time.strftime('%Y-%m-%d')}; load {load[0]:.1f} before and "
        f"{load[1]:.1f} after."
    )
    lines = [head]
    peers = _rows(results, PEERS)
    if peers:
        sides = list(peers[0][1])
        lines += ["", "Raw DDP = 1: median (fastest to slowest).", ""]
        lines += _grid(["", *sides], [[what, *map(row.get, sides)] for what, row in peers])
    own = _rows(results, OWN)
    if own:
        figures = [[what, *row] for what, row in own]
        lines += ["", *_grid(["", "median", "fastest", "slowest"], figures)]
    return "\n".join(lines) + "\n"


def _rows(results, kinds):
    return [row for name in kinds if name in results for row in kinds[name](results[name])]


def _grid(head, rows):
    """Return the lines of a table. The first column is text, the others are figures."""
    return [_line(head), _line(["---"] + ["---:"] * (len(head) - 1)), *map(_line, rows)]


def _line(cells):
    return f"| {' | '.join(cells)} |"


def draw_peers(epochs, starts, path):
    """Draw epochs and starts, with one bar per side."""
    panels = {f"epoch of {name}": sides for name, sides in epochs["epoch"].items()}
    if starts is not None:
        panels["start to first step"] = starts["start"]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4 * len(panels), 3.2), squeeze=False)
    for axis, (title, sides) in zip(axes[0], panels.items(), strict=True):
        ratios = [row["ratio"] for row in sides.values()]
        middle = [ratio["median"] for ratio in ratios]
        around = [
            [ratio["median"] - ratio["min"] for ratio in ratios],
            [ratio["max"] - ratio["median"] for ratio in ratios],
        ]
        colors = [OURS if side == "raysgd" else OTHERS for side in sides]
        bars = axis.barh(list(sides), middle, xerr=around, color=colors, ecolor="#55606b")
        axis.bar_label(bars, [f" {ratio:.2f}" for ratio in middle], label_type="center")
        axis.axvline(1, color="#55606b", linestyle=":")
        axis.set(title=title, xlabel="hand-written DDP = 1")
        axis.invert_yaxis()
    _write(figure, path)


def draw_scale(result, path):
    """Draw the time of a call, a resume, and a join over the number of workers."""
    rows = {int(number): row for number, row in result["workers"].items()}
    groups = [number for number in rows if number > 1]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4))
    calls = [1e3 * row["call"]["median"] for row in rows.values()]
    left.plot(list(rows), calls, "o-", color=OURS, label="train(num_steps=1)")
    budget = [2 + 0.5 * number for number in rows]
    left.plot(list(rows), budget, ":", color="#55606b", label="2 ms + 0.5 ms a worker")
    left.set(title="a call that does nothing", xlabel="workers", ylabel="ms")
    for name, color in (("resume", OTHERS), ("join", OURS)):
        for size, style in (("small", "o-"), ("large", "s--")):
            parts = [rows[n] if size == "small" else rows[n]["large"] for n in groups]
            floats = f"{result['floats'][size]:,} floats"
            right.plot(
                groups,
                [1e3 * part[name]["median"] for part in parts],
                style,
                color=color,
                label=f"{name}, {floats}",
            )
    right.set(title="a new generation", xlabel="workers", ylabel="ms", yscale="log")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
    _write(figure, path)


def _write(figure, path):
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("benchmark_results"))
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), help="these alone")
    parser.add_argument("--smoke-test", action="store_true", help="a look at each")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    before = os.getloadavg()[0]
    for name in args.only:
        run(name, args.folder, args.smoke_test)
    there = [name for name in ROWS if _result_of(name, args.folder).exists()]
    results = {name: json.loads(_result_of(name, args.folder).read_text()) for name in there}
    page = table(results, (before, os.getloadavg()[0]))
    (args.folder / "results.md").write_text(page)
    if "epoch" in results:
        draw_peers(results["epoch"], results.get("start"), args.folder / "peers.svg")
    if "scale" in results:
        draw_scale(results["scale"], args.folder / "scale.svg")
    print(f"\n{page}\nin {args.folder.resolve()}")


if __name__ == "__main__":
    main()
