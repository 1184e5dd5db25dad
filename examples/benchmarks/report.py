"""Measure the cost of a report of a training function.

    python examples/benchmarks/report.py
    python examples/benchmarks/report.py --num-workers 4 --num-reports 10000

Each worker sleeps for some milliseconds and reports a kilobyte. The cost is the difference to a run
without reports, divided by the number of reports.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from _workloads import machine, spread

from raysgd import train
from raysgd.train import Trainer
from raysgd.train.backend import BackendConfig


def work(config):
    """Return the total seconds, and the seconds of each report."""
    text, spent = "x" * 1000, []
    began = time.perf_counter()
    for n in range(config["num_reports"]):
        time.sleep(config["work_s"])
        before = time.perf_counter()
        if config["reports"]:
            train.report(n=n, text=text)
        spent.append(time.perf_counter() - before)
    return time.perf_counter() - began, spent


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--num-reports", type=int, default=1000)
    parser.add_argument("--work-ms", type=float, default=5.0)
    parser.add_argument("--runs", type=int, default=5, help="pairs of runs, with and without")
    parser.add_argument("--smoke-test", action="store_true", help="one pair of short runs")
    parser.add_argument("--json", type=Path, help="write the result there")
    args = parser.parse_args()
    runs = args.runs
    if args.smoke_test:
        runs, args.num_reports = 1, 50

    config = {"num_reports": args.num_reports, "work_s": args.work_ms / 1000}
    costs, waits = [], []
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(BackendConfig(), num_workers=args.num_workers, logdir=folder)
        trainer.start()
        try:
            for _ in range(runs):
                plain = trainer.run(work, {**config, "reports": False})
                reported = trainer.run(work, {**config, "reports": True})
                cost = max(total for total, _ in reported) - max(total for total, _ in plain)
                costs.append(cost / args.num_reports)
                waits += [seconds for _, spent in reported for seconds in spent]
        finally:
            trainer.shutdown()
    cost = spread(costs)
    low, middle, high = (1e3 * cost[key] for key in ("min", "median", "max"))
    print(
        f"{runs} times {args.num_reports} reports by {args.num_workers} workers, "
        f"{args.work_ms:g} ms of work each: {middle:.2f} ms a report beyond the work ({low:.2f} to "
        f"{high:.2f}); in the function a report took {statistics.median(waits) * 1000:.2f} ms "
        f"(median), {max(waits) * 1000:.1f} ms at most"
    )
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "report": cost}, indent=2))


if __name__ == "__main__":
    main()
