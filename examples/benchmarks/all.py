"""Run all benchmarks one after the other, and write their results to a folder.

    python examples/benchmarks/all.py
    python examples/benchmarks/all.py --folder results --only epoch start
    python examples/benchmarks/all.py --smoke-test

``--only`` runs some benchmarks again and takes the other results from the folder. The folder gets a
JSON file per benchmark, the table of the documentation (``results.md``), and drawings:
``peers.svg`` (epochs and starts of all sides) and ``scale.svg``. Use an idle machine. The table
names the machine, the day, and the commit of each benchmark.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

FOLDER = Path(__file__).parent
OURS, OTHERS = "#e4572e", "#8da0b3"
FIGURE = "figure"


def run(name, folder, smoke_test):
    path = _result_of(name, folder)
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--json", str(path)]
    print(f"\n==== {name}", flush=True)
    subprocess.run(command + ["--smoke-test"] * smoke_test, check=True)


def _result_of(name, folder):
    return folder / f"{name}.json"


def spread(figure, scale=1.0, digits=2):
    """Return the median, and the range around it."""
    middle, low, high = (f"{scale * figure[part]:.{digits}f}" for part in ("median", "min", "max"))
    return middle if low == high else f"{middle} ({low}\N{EN DASH}{high})"


def ms(figure):
    return spread(figure, 1e3, 0 if figure["median"] >= 0.1 else 1)


def epoch_rows(result):
    for workload, sides in result["epoch"].items():
        yield f"epoch of {workload}", {side: spread(row["ratio"]) for side, row in sides.items()}


def start_rows(result):
    sides = result["start"]
    yield "start to first step", {side: spread(row["ratio"]) for side, row in sides.items()}


def calls_rows(result):
    for key, what in (
        ("train", "`train(num_steps=1)` beyond its step, ms"),
        ("validate", "`validate(num_steps=1)` beyond its step, ms"),
        ("apply", "`apply_all_operators`, ms"),
        ("buffers", "`train(num_steps=1)` with its step, floats in a buffer, ms"),
    ):
        yield what, {f"{int(floats):,} floats": ms(row) for floats, row in result[key].items()}


def scale_rows(result):
    rows = result["workers"]
    for key, what in (
        ("call", "a call that does nothing, ms"),
        ("ray", "as many calls of empty Ray actors, ms"),
    ):
        yield what, {_workers(number): ms(row[key]) for number, row in rows.items()}
    for size in ("small", "large"):
        parts = {
            number: row if size == "small" else row.get("large", {}) for number, row in rows.items()
        }
        what = f"a replacement joins, {result['floats'][size]:,} floats, ms"
        yield (
            what,
            {_workers(n): ms(part["join"]) if "join" in part else "" for n, part in parts.items()},
        )


def _workers(number):
    return "1 worker" if int(number) == 1 else f"{number} workers"


def recovery_rows(result):
    for moment, sizes in result["loss"].items():
        for key, what in (("next_step_s", "to the next step"), ("full_size_s", "to full size")):
            figures = {_workers(size): ms(row[key]) for size, row in sizes.items()}
            yield f"loss of one ({moment}) {what}, ms", figures
        figures = {_workers(size): spread(row["redone"], digits=0) for size, row in sizes.items()}
        yield f"loss of one ({moment}), steps repeated", figures
    for key, part, what in (
        ("growth", "growth_pause_s", "growth by one, pause, ms"),
        ("move", "pause_s", "move of one, pause, ms"),
    ):
        sizes = result.get(key, {})
        if sizes:
            yield what, {_workers(size): ms(row[part]) for size, row in sizes.items()}
    for side, faults in result.get("hosts", {}).items():
        for fault, row in faults.items():
            figures = {
                "pause, ms": ms(row["standstill_s"]),
                "steps repeated": spread(row["redone"], digits=0),
            }
            yield f"a host: {fault}, {side}", figures


def saving_rows(result):
    added = sorted(100 * (pair["ratio"] - 1) for pair in result["pairs"])
    figure = {"median": statistics.median(added), "min": added[0], "max": added[-1]}
    yield "a save that does not block, time added to training, %", {FIGURE: spread(figure, 1, 1)}


def fidelity_rows(result):
    figure = spread(result["ratio"])
    yield "epoch of resnet on three workers that were four, four = 1", {FIGURE: figure}


def report_rows(result):
    what = "`raysgd.train.report()` beyond the slowest worker's work, ms"
    yield what, {FIGURE: ms(result["report"])}


def large_state_rows(result):
    rows, megabytes = result["rows"], result["args"]["megabytes"]
    means = {side: f"{statistics.mean(row['epochs_s'][1:]):.2f}" for side, row in rows.items()}
    yield f"mean epoch with a state of {megabytes} MB, s", means
    for key, what in (("worker_mb", "a worker"), ("driver_mb", "the driver")):
        figures = {side: f"{row[key]:.0f}" if key in row else "" for side, row in rows.items()}
        yield f"peak memory of {what}, MB", figures


def sharding_rows(result):
    workers, floats = result["workers"], result["floats"]
    for side, row in result["epoch"].items():
        what = f"epoch of resnet by AdamW, {workers} workers, {side}, not sharded = 1"
        yield what, {FIGURE: spread(row)}
    what = f"the same, {workers} workers, one copy, no copy = 1"
    yield what, {FIGURE: spread(result["copy"])}
    for key, text in (
        ("memory", "most memory of a worker"),
        ("state", "AdamW's state on a worker"),
    ):
        for side, row in result[key].items():
            what = f"{text}, {floats['memory']:,} floats, {side}, MiB"
            yield what, {FIGURE: spread(row, 1 / 2**20, 0)}
    for side, row in result["next_step_s"].items():
        yield (
            f"loss to the next step, {floats['next_step']:,} floats, {side}, ms",
            {FIGURE: ms(row)},
        )


ROWS = {
    "epoch": epoch_rows,
    "start": start_rows,
    "calls": calls_rows,
    "scale": scale_rows,
    "recovery": recovery_rows,
    "saving": saving_rows,
    "fidelity": fidelity_rows,
    "report": report_rows,
    "sharding": sharding_rows,
    "large_state": large_state_rows,
}


def page_of(results):
    """Return the results as Markdown: one table for consecutive rows with the same columns."""
    places = {}
    for name, result in results.items():
        about = result["machine"]
        place = (
            f"{about['cpu']}, {about['cpus']} CPUs, Python {about['python']}, PyTorch "
            f"{about['torch']}, Ray {about['ray']}, {about['date']}, commit {about['commit']}"
        )
        places.setdefault(place, []).append(name)
    lines = [f"{', '.join(names)}: {place}." for place, names in places.items()]
    lines += ["", "Figures are medians, with the range in parentheses."]
    rows = [row for name in ROWS if name in results for row in ROWS[name](results[name])]
    for columns, group in itertools.groupby(rows, key=lambda row: tuple(row[1])):
        lines += ["", _line(["", *columns]), _line(["---"] + ["---:"] * len(columns))]
        lines += [_line([what, *figures.values()]) for what, figures in group]
    return "\n".join(lines) + "\n"


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
    for name in args.only:
        run(name, args.folder, args.smoke_test)
    there = [name for name in ROWS if _result_of(name, args.folder).exists()]
    results = {name: json.loads(_result_of(name, args.folder).read_text()) for name in there}
    page = page_of(results)
    (args.folder / "results.md").write_text(page)
    if "epoch" in results:
        draw_peers(results["epoch"], results.get("start"), args.folder / "peers.svg")
    if "scale" in results:
        draw_scale(results["scale"], args.folder / "scale.svg")
    print(f"\n{page}\nin {args.folder.resolve()}")


if __name__ == "__main__":
    main()
