"""Measure the overhead of a trainer call for models of different sizes.

    python examples/benchmarks/calls.py

The first figure is the time of ``train(num_steps=1)`` without the step itself, for models of 1,000
to 25 million floats. It should not depend on the size, because the model does not travel. The
second is the whole time if the floats are in a buffer, which each step copies. ``scale.py``
measures calls by the number of workers.
"""

import argparse
import json
import os
import time
from pathlib import Path

import ray
import torch
from _workloads import NUM_WORKERS, Floats, machine, spread

from raysgd import TorchTrainer

WARM_UP = 3


class Buffered(Floats):
    """A model with one parameter and a buffer of a given number of floats."""

    def make_model(self, floats):
        model = torch.nn.Linear(1, 1, bias=False)
        model.register_buffer("unchanged", torch.zeros(floats))
        return model

    def samples(self, config):
        return super().samples({"floats": 1})


def time_calls(operator_cls, floats, runs):
    """Return the seconds of a call with one step: in total, and outside the worker's loop."""
    whole, beyond = [], []
    with TorchTrainer(
        training_operator_cls=operator_cls,
        config={"floats": floats},
        num_workers=NUM_WORKERS,
        min_workers=NUM_WORKERS,
    ) as trainer:
        for _ in range(WARM_UP + runs):
            started = time.perf_counter()
            metrics = trainer.train(num_steps=1, profile=True)
            whole.append(time.perf_counter() - started)
            beyond.append(whole[-1] - metrics["profile"]["mean_train_epoch_s"])
    return spread(whole[WARM_UP:]), spread(beyond[WARM_UP:])


def print_row(floats, row):
    low, middle, high = (1e3 * row[key] for key in ("min", "median", "max"))
    print(f"{floats:12,}   {middle:36.1f} ms   ({low:.1f} to {high:.1f} ms)", flush=True)


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
    result = {"machine": machine(), "floats": {}, "buffers": {}}
    print(f"\n{'floats':>12}   train(num_steps=1) beyond its step, {runs} calls   (min to max)")
    for floats in sizes:
        _, row = time_calls(Floats, floats, runs)
        result["floats"][floats] = row
        print_row(floats, row)
    print(f"\n{'in a buffer':>12}   train(num_steps=1) with its step, {runs} calls   (min to max)")
    for floats in sizes:
        row, _ = time_calls(Buffered, floats, runs)
        result["buffers"][floats] = row
        print_row(floats, row)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
