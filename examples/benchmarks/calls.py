"""Measure the overhead of a trainer call for models of different sizes.

    python examples/benchmarks/calls.py

The first figures are the times of ``train(num_steps=1)`` and ``validate(num_steps=1)`` without
their step, and of ``apply_all_operators``, for models of 1,000 to 25 million floats. They should
not depend on the size, because the model does not travel. The last is the whole time of
``train(num_steps=1)`` if the floats are in a buffer, which each step copies. ``scale.py`` measures
calls by the number of workers.
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


CALLS = {
    "train": lambda trainer: trainer.train(num_steps=1, profile=True)["profile"],
    "validate": lambda trainer: trainer.validate(num_steps=1, profile=True)["profile"],
    "apply": lambda trainer: trainer.apply_all_operators(nothing) and {},
}
"""Calls, each of which returns the times of its parts. The longest part is its work."""
NAMES = {
    "train": "train(num_steps=1) beyond its step",
    "validate": "validate(num_steps=1) beyond its step",
    "apply": "apply_all_operators",
    "buffers": "train(num_steps=1) with its step, floats in a buffer",
}


def nothing(operator):
    pass


def time_calls(operator_cls, floats, runs):
    """Return the seconds of each call: outside of the worker's loop, and in total."""
    beyond, whole = {name: [] for name in CALLS}, {name: [] for name in CALLS}
    with TorchTrainer(
        training_operator_cls=operator_cls,
        config={"floats": floats},
        num_workers=NUM_WORKERS,
        min_workers=NUM_WORKERS,
    ) as trainer:
        # After `apply_all_operators`, the next call compares the whole models.
        for name, call in CALLS.items():
            for _ in range(WARM_UP + runs):
                started = time.perf_counter()
                work = call(trainer)
                whole[name].append(time.perf_counter() - started)
                beyond[name].append(whole[name][-1] - max(work.values(), default=0.0))
    return [
        {name: spread(s[WARM_UP:]) for name, s in figures.items()} for figures in (beyond, whole)
    ]


def print_row(name, floats, row):
    low, middle, high = (1e3 * row[key] for key in ("min", "median", "max"))
    print(
        f"{NAMES[name]:52} {floats:12,} {middle:8.1f} ms ({low:.1f} to {high:.1f} ms)", flush=True
    )


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
    result = {"machine": machine()} | {name: {} for name in NAMES}
    for floats in sizes:
        rows = time_calls(Floats, floats, runs)[0]
        rows["buffers"] = time_calls(Buffered, floats, runs)[1]["train"]
        for name, row in rows.items():
            result[name][floats] = row
            print_row(name, floats, row)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
