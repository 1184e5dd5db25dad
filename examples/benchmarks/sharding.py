"""Measure the cost and benefit of sharding: epochs, memory, and the step after a failure.

    python examples/benchmarks/sharding.py
    python examples/benchmarks/sharding.py --sharding full --epochs-alone
    python examples/benchmarks/sharding.py --num-workers 4 --runs 9 --json sharding.json

The optimizer is sharded, and with ``--sharding full`` the model too.

- *epoch*: resnet with AdamW, without and with one replica of each shard, compared with an unsharded
  trainer. The trainers take turns.
- *memory*: peak memory of a worker with AdamW, and the memory of AdamW's state between steps (the
  excess over plain SGD).
- *next step*: from the SIGKILL of a worker to the first step that the survivors finish.
"""

import argparse
import functools
import json
import math
import os
import resource
import statistics
import threading
import time
from pathlib import Path

import ray
import torch
from _workloads import (
    BATCH_SIZES,
    NUM_STEPS,
    NUM_WORKERS,
    in_turn,
    machine,
    make_data,
    make_model,
    spread,
)
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, TorchTrainer, TrainingOperator
from raysgd.testing import chaos

SIDES = {"not divided": None, "no copy": 0, "one copy": 1}
"""Number of replicas of each shard."""
NUM_LAYERS = 8


class Timed(TrainingOperator):
    """Trains resnet, or layers of a given size, and records the time of each step."""

    def setup(self, config):
        torch.manual_seed(0)
        floats = config["floats"]
        if floats is None:
            model, data = make_model("resnet"), make_data("resnet", NUM_STEPS["resnet"])
        else:
            size = math.isqrt(floats // NUM_LAYERS)
            layers = [torch.nn.Linear(size, size, bias=False) for _ in range(NUM_LAYERS)]
            model = torch.nn.Sequential(*layers)
            data = TensorDataset(torch.randn(4096, size), torch.randn(4096, size))
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=getattr(torch.optim, config["optimizer"])(model.parameters(), lr=1e-4),
            criterion=torch.nn.MSELoss(),
            **config["register"],
        )
        # The data of resnet are sized for two workers.
        size = BATCH_SIZES["resnet"] * NUM_WORKERS // self.world_size if floats is None else 2
        self.register_data(train_loader=DataLoader(data, batch_size=size, shuffle=True))
        self.steps = []

    def train_batch(self, batch, batch_info):
        metrics = super().train_batch(batch, batch_info)
        self.steps.append((time.monotonic(), self.world_size))
        return metrics


def make_trainer(num_workers, sharding, side, floats, optimizer="AdamW"):
    copies = SIDES[side]
    divided = {"sharding": sharding, "sharding_args": {"num_copies": copies}}
    register = {} if copies is None else divided
    return TorchTrainer(
        training_operator_cls=Timed,
        config={"register": register, "floats": floats, "optimizer": optimizer},
        num_workers=num_workers,
        elastic=ElasticConfig(replace_workers=False, snapshot_every=None),
    )


def epochs(make, runs):
    """Return the epochs of each side relative to unsharded ones, and the cost of a replica."""
    trainers = {side: make(side, None) for side in SIDES}
    try:

        def epoch(trainer):
            started = time.perf_counter()
            trainer.train()
            return time.perf_counter() - started

        sides = {side: lambda _, trainer=t: epoch(trainer) for side, t in trainers.items()}
        seconds = in_turn(runs, sides)
    finally:
        for trainer in trainers.values():
            trainer.shutdown()

    def ratio(side, to):
        return spread([a / b for a, b in zip(seconds[side], seconds[to], strict=True)])

    return {side: ratio(side, "not divided") for side in SIDES}, ratio("one copy", "no copy")


def memory_of_process():
    """Return the peak and the current memory of this process in bytes."""
    held = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, held


def memory(make, floats):
    """Return the peak memory of the workers and the size of the state for each side."""
    most, held = {}, {}
    for side, optimizer in [("not divided", "SGD"), *((side, "AdamW") for side in SIDES)]:
        with make(side, floats, optimizer) as trainer:
            trainer.train(num_steps=4)
            most[side], held[side, optimizer] = zip(
                *trainer.apply_all_workers(memory_of_process), strict=True
            )
    without = statistics.median(held["not divided", "SGD"])
    state = {side: [each - without for each in held[side, "AdamW"]] for side in SIDES}
    return {side: spread(most[side]) for side in SIDES}, {s: spread(state[s]) for s in SIDES}


def next_step(make, num_workers, floats, runs):
    """Return the seconds from a kill to the next step for each side."""
    seconds = {side: [] for side in SIDES if side != "no copy"}  # which would restart
    for _ in range(runs):
        for side, measured in seconds.items():
            with make(side, floats) as trainer:
                trainer.train(num_steps=4)
                killed = []

                def kill(trainer=trainer, killed=killed):
                    killed.append(time.monotonic())
                    chaos.kill(trainer, 1)

                timer = threading.Timer(1.0, kill)
                timer.start()
                while trainer.num_workers == num_workers:
                    trainer.train(num_steps=20)
                timer.join()
                steps = trainer.apply_all_operators(lambda operator: operator.steps)[0]
                measured.append(next(t for t, size in steps if size < num_workers) - killed[0])
    return {side: spread(measured) for side, measured in seconds.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=4)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--sharding", choices=["optimizer", "full"], default="optimizer")
    parser.add_argument("--epochs-alone", action="store_true")
    parser.add_argument("--smoke-test", action="store_true", help="one run of small models")
    parser.add_argument("--json", type=Path, help="write the result there")
    args = parser.parse_args()
    make = functools.partial(make_trainer, args.num_workers, args.sharding)
    runs = 1 if args.smoke_test else args.runs
    large, middle = (10_000, 10_000) if args.smoke_test else (25_000_000, 10_000_000)
    ray.init("local", num_cpus=3 * args.num_workers, include_dashboard=False)
    epoch, copy = epochs(make, runs)
    for side, ratio in epoch.items() if args.epochs_alone else ():
        print(f"{side:12} epoch {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})")
    if args.epochs_alone:
        spent = f"{copy['median']:.2f} ({copy['min']:.2f} to {copy['max']:.2f})"
        print(f"an epoch with one copy takes {spent} of one without")
        return
    most, state = memory(make, large)
    result = {
        "machine": machine(),
        "workers": args.num_workers,
        "floats": {"memory": large, "next_step": middle},
        "epoch": epoch,
        "copy": copy,
        "memory": most,
        "state": state,
        "next_step_s": next_step(make, args.num_workers, middle, runs),
    }
    for side in SIDES:
        ratio, step = result["epoch"][side], result["next_step_s"].get(side)
        print(
            f"{side:12} epoch {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})   "
            f"memory {most[side]['max'] / 2**20:.0f} MiB, state {state[side]['max'] / 2**20:.0f}"
            + (f"   next step {1e3 * step['median']:.0f} ms" if step else "")
        )
    print(f"an epoch with one copy takes {copy['median']:.2f} of one without")
    print(f"{args.num_workers} workers, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
