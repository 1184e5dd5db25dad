"""Time what a call of the trainer costs: by the size of the model, and by the number of workers.

    python examples/benchmarks/calls.py
    python examples/benchmarks/calls.py --num-workers 1 2 4

First, what ``train(num_steps=1)`` takes beyond the step itself, for models of a thousand floats to
25 million: nothing of the model may travel. Then the same call for an operator that does nothing,
with one to 16 workers, beside the time of one call of a Ray actor: what the driver's fan-out costs.
The workers of the second part share the machine's CPUs and do nothing with them.
"""

import argparse
import json
import os
import time
from pathlib import Path

import ray
import torch
from _workloads import NUM_WORKERS, machine, spread
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator

WARM_UP = 3


class Floats(TrainingOperator):
    """A model of so many floats; its step is cheap."""

    def setup(self, config):
        model = torch.nn.Linear(config["floats"], 1, bias=False)
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
            criterion=torch.nn.MSELoss(),
        )
        data = TensorDataset(torch.zeros(64, 1).expand(64, config["floats"]), torch.zeros(64, 1))
        self.register_data(train_loader=DataLoader(data, batch_size=1))


class Nothing(TrainingOperator):
    """Has a model, and trains it no more than by counting a batch."""

    def setup(self, config):
        model = torch.nn.Linear(1, 1)
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
            criterion=torch.nn.MSELoss(),
        )
        data = TensorDataset(torch.zeros(4096, 1))
        self.register_data(train_loader=DataLoader(data, batch_size=1))

    def train_batch(self, batch, batch_info):
        return {"num_samples": 1}


@ray.remote(num_cpus=0)
class Actor:
    def answer(self):
        return None


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


def time_calls_by_workers(num_workers, runs):
    """Return the seconds of a start, of a call of a no-op operator, and of a Ray call, in turn."""
    actor = Actor.remote()
    ray.get(actor.answer.remote())
    calls, plain = [], []
    started = time.perf_counter()
    with TorchTrainer(
        training_operator_cls=Nothing,
        num_workers=num_workers,
        min_workers=num_workers,
        num_cpus_per_worker=0.01,
        wrap_ddp=False,
    ) as trainer:
        trainer.train(num_steps=1)
        start_s = time.perf_counter() - started
        for _ in range(WARM_UP + runs):
            began = time.perf_counter()
            trainer.train(num_steps=1)
            middle = time.perf_counter()
            ray.get(actor.answer.remote())
            calls.append(middle - began)
            plain.append(time.perf_counter() - middle)
    return {"start_s": start_s, "call": spread(calls[WARM_UP:]), "ray": spread(plain[WARM_UP:])}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=50, help="counted calls a row")
    parser.add_argument("--num-workers", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    parser.add_argument("--smoke-test", action="store_true", help="small models, few workers")
    parser.add_argument("--json", type=Path, help="write the result there")
    args = parser.parse_args()
    sizes = (1_000,) if args.smoke_test else (1_000, 2_500_000, 25_000_000)
    groups, runs = ([1, 2], 5) if args.smoke_test else (args.num_workers, args.runs)
    ray.init(
        "local",
        num_cpus=max(NUM_WORKERS, os.cpu_count()),
        include_dashboard=False,
        log_to_driver=False,
    )
    result = {"machine": machine(), "floats": {}, "workers": {}}
    print(f"\n{'floats':>12}   train(num_steps=1) beyond its step, {runs} calls   (min to max)")
    for floats in sizes:
        row = result["floats"][floats] = time_calls_by_floats(floats, runs)
        low, middle, high = (1e3 * row[key] for key in ("min", "median", "max"))
        print(f"{floats:12,}   {middle:36.1f} ms   ({low:.1f} to {high:.1f} ms)", flush=True)
    print(f"\n{'workers':>12}   a call that does nothing   (min to max)   one Ray call      start")
    for number in groups:
        row = result["workers"][number] = time_calls_by_workers(number, runs)
        low, middle, high = (1e3 * row["call"][key] for key in ("min", "median", "max"))
        print(
            f"{number:12}   {middle:21.1f} ms   ({low:.1f} to {high:.1f} ms)"
            f"{1e3 * row['ray']['median']:11.1f} ms{row['start_s']:9.1f} s",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
