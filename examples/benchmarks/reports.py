"""What a report of a training function costs beyond the work of the slowest worker.

    python examples/benchmarks/reports.py
    python examples/benchmarks/reports.py --num-workers 4 --num-reports 10000

Each worker works for some milliseconds, in a sleep, and reports a kilobyte. The run's time less
that of the same work without reports, by the number of reports, is what one costs.
"""

import argparse
import statistics
import tempfile
import time

from raysgd import train
from raysgd.train import Trainer
from raysgd.train.backend import BackendConfig


def work(config):
    """Return the seconds of all, and of each report."""
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
    args = parser.parse_args()

    config = {"num_reports": args.num_reports, "work_s": args.work_ms / 1000}
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(BackendConfig(), num_workers=args.num_workers, logdir=folder)
        trainer.start()
        try:
            plain = trainer.run(work, {**config, "reports": False})
            reported = trainer.run(work, {**config, "reports": True})
        finally:
            trainer.shutdown()
    cost = max(total for total, _ in reported) - max(total for total, _ in plain)
    waits = [seconds for _, spent in reported for seconds in spent]
    print(
        f"{args.num_reports} reports by {args.num_workers} workers, {args.work_ms:g} ms of work "
        f"each: {cost / args.num_reports * 1000:.2f} ms a report beyond the work; in the function "
        f"a report took {statistics.median(waits) * 1000:.2f} ms (median), "
        f"{max(waits) * 1000:.1f} ms at most"
    )


if __name__ == "__main__":
    main()
