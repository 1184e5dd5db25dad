"""Measure the cost of start, call, failure, and join by the number of workers.

    python examples/benchmarks/scale.py
    python examples/benchmarks/scale.py --num-workers 2 4

The operator does not use its model, so that 16 workers can share a few CPUs. Each number of workers
has its own group:

- *start*: from the constructor to the first finished step. On few CPUs, most of it is the import of
  PyTorch in each worker.
- *call*: ``train(num_steps=1)``, compared with one call each of as many empty Ray actors.
- *resume*: after a SIGKILL, the time that the driver takes to form a new generation of survivors
with
  the newest state. Measured with a small and a large model.
- *join*: the same for a generation with a replacement worker, which receives the state.
"""

import argparse
import json
import math
import os
import time
from pathlib import Path

import ray
import torch
from _workloads import Floats, machine, spread
from torch.utils.data import TensorDataset

from raysgd import ElasticConfig, TorchTrainer
from raysgd.testing import chaos

WARM_UP, IN_TURN = 3, 10
SMALL, LARGE = 1_000, 25_000_000  # floats
GIVE_UP_S = 300.0


class Nothing(Floats):
    """Has a model, but only counts batches."""

    def samples(self, config):
        return TensorDataset(torch.zeros(100_000, 1))

    def train_batch(self, batch, batch_info):
        return {"num_samples": 1}


@ray.remote(num_cpus=0)
class Actor:
    def answer(self):
        return None


def time_calls(trainer, runs):
    """Return the seconds of a trainer call and of as many Ray calls, in turn."""
    actors = [Actor.remote() for _ in range(trainer.num_workers)]
    ray.get([actor.answer.remote() for actor in actors])
    sides = {
        "call": lambda: trainer.train(num_steps=1),
        "ray": lambda: ray.get([actor.answer.remote() for actor in actors]),
    }
    seconds = {side: [] for side in sides}
    # Several at a time, because alternating single calls would always find cold caches.
    for _ in range(math.ceil(runs / IN_TURN)):
        for side, call in sides.items():
            for number in range(WARM_UP + IN_TURN):
                began = time.perf_counter()
                call()
                if number >= WARM_UP:
                    seconds[side].append(time.perf_counter() - began)
    for actor in actors:
        ray.kill(actor)
    return {side: spread(found) for side, found in seconds.items()}


def time_losses(trainer, runs):
    """Kill and replace the last worker `runs` times. Return the seconds of both."""
    seconds = {"regrouped": [], "grown": []}
    for _ in range(runs):
        seen = len(trainer.events)
        chaos.kill(trainer, trainer.num_workers - 1)
        deadline = time.monotonic() + GIVE_UP_S
        while not any(event.kind == "grown" for event in trainer.events[seen:]):
            trainer.train(num_steps=1)
            if time.monotonic() > deadline:
                raise SystemExit(f"no replacement worker joined within {GIVE_UP_S:g} s")
        for event in trainer.events[seen:]:
            if event.kind in seconds:
                seconds[event.kind].append(event.seconds)
    return {"resume": spread(seconds["regrouped"]), "join": spread(seconds["grown"])}


def time_group(num_workers, floats, calls, losses):
    started = time.perf_counter()
    with TorchTrainer(
        training_operator_cls=Nothing,
        config={"floats": floats},
        num_workers=num_workers,
        min_workers=num_workers - (num_workers > 1),
        num_cpus_per_worker=0.01,
        elastic=ElasticConfig(resize_cooldown_s=0.0, snapshot_every=None),
    ) as trainer:
        if trainer.num_workers < num_workers:
            raise SystemExit(f"only {trainer.num_workers} of {num_workers} workers started")
        trainer.train(num_steps=1)
        figures = {"start_s": time.perf_counter() - started}
        if calls:
            figures |= time_calls(trainer, calls)
        if num_workers > 1:
            figures |= time_losses(trainer, losses)
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--calls", type=int, default=50, help="counted calls a group, in tens")
    parser.add_argument("--losses", type=int, default=3, help="losses a group")
    parser.add_argument("--smoke-test", action="store_true", help="two workers, a small model")
    parser.add_argument("--json", type=Path, help="write the result there")
    args = parser.parse_args()
    groups, large = ([2], 10_000) if args.smoke_test else (args.num_workers, LARGE)
    calls, losses = (5, 1) if args.smoke_test else (args.calls, args.losses)
    ray.init("local", num_cpus=max(2, os.cpu_count()), include_dashboard=False, log_to_driver=False)
    result = {"machine": machine(), "floats": {"small": SMALL, "large": large}, "workers": {}}
    print(f"\n{'workers':>8}{'start':>9}{'call':>10}{'Ray alone':>10}", end="")
    print(f"{'resume':>10}{'large':>9}{'join':>10}{'large':>9}")
    for number in groups:
        small = time_group(number, SMALL, calls, losses)
        row = result["workers"][number] = {**small, "large": {}}
        print(f"{number:8}{row['start_s']:7.1f} s", end="")
        print("".join(f"{1e3 * row[name]['median']:7.1f} ms" for name in ("call", "ray")), end="")
        if number > 1:
            row["large"] = time_group(number, large, 0, losses)
            for name in ("resume", "join"):
                print(f"{1e3 * row[name]['median']:7.0f} ms", end="")
                print(f"{1e3 * row['large'][name]['median']:6.0f} ms", end="")
        print(flush=True)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
