"""Time what a call of the trainer costs by the size of the model, which shall be nothing.

    python examples/benchmarks/calls.py

What ``train(num_steps=1)`` takes beyond the step itself, for models of a thousand floats to
25 million: nothing of the model may travel. What it costs by the number of workers: ``scale.py``.
"""

import argparse
import json
import os
import time
from pathlib import Path

import ray
from _workloads import NUM_WORKERS, Floats, machine, spread

from raysgd import TorchTrainer

WARM_UP = 3


def time_calls_by_floats(floats, runs):
    """Return the seconds that a call of one step takes beyond the worker's own loop."""
    beyond = []
    with TorchTrainer(
        training_operator_cls=Floats,
        config={"floats": floats},
        num_workers=NUM_WORKERS,
        min_workers=NUM_WORKERS,
    ) as trainer:
        for _ in range(WARM_UP + runs):
            started = time.perf_counter()
            metrics = trainer.train(num_steps=1, profile=True)
            beyond.append(time.perf_counter() - started - metrics["profile"]["mean_train_epoch_s"])
    return spread(beyond[WARM_UP:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=50, help="counted calls a row")
    parser.add_argument("--smoke-test", action="store_true", help="the small model only")
    parser.add_argument("--json", type=Path, help="write the result there")
    args = parser.parse_args()
    sizes = (1_000,) if args.smoke_test else (1_000, 2_500_000, 25_000_000)
    runs = 5 if args.smoke_test else args.runs
    ray.init(
        "local",
        num_cpus=max(NUM_WORKERS, os.cpu_count()),
        include_dashboard=False,
        log_to_driver=False,
    )
    result = {"machine": machine(), "floats": {}}
    print(f"\n{'floats':>12}   train(num_steps=1) beyond its step, {runs} calls   (min to max)")
    for floats in sizes:
        row = result["floats"][floats] = time_calls_by_floats(floats, runs)
        low, middle, high = (1e3 * row[key] for key in ("min", "median", "max"))
        print(f"{floats:12,}   {middle:36.1f} ms   ({low:.1f} to {high:.1f} ms)", flush=True)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
