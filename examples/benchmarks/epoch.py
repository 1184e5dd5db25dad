"""Time an epoch against the hand-written DistributedDataParallel loop, side by side.

    python examples/benchmarks/epoch.py
    python examples/benchmarks/epoch.py --runs 3 --smoke-test

Both sides have two workers with one thread each, the same data in the same order and the same
first weights, stay alive for the whole run, and take their epochs in turn. Their losses have to
agree. It also shows what a call of ``train(num_steps=1)`` costs beyond the step itself.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import raysgd
from raysgd import TorchTrainer, TrainingOperator

NUM_WORKERS = 2
BATCH_SIZE = 32


class Residual(torch.nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            torch.nn.BatchNorm2d(outputs),
            torch.nn.ReLU(),
            torch.nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            torch.nn.BatchNorm2d(outputs),
        )
        self.shortcut = torch.nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, images):
        return torch.relu(self.body(images) + self.shortcut(images))


def make_model(name):
    torch.manual_seed(0)
    if name == "mlp":
        return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    return torch.nn.Sequential(
        Residual(3, 16, 1),
        Residual(16, 32, 2),
        Residual(32, 64, 2),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 1),
    )


def make_data(name, num_steps):
    size = (32,) if name == "mlp" else (3, 32, 32)
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(num_steps * BATCH_SIZE * NUM_WORKERS, *size, generator=generator)
    return TensorDataset(features, features.flatten(1).mean(dim=1, keepdim=True))


def raw_worker(rank, name, num_steps, port, pipes):
    """Train as PyTorch's DistributedDataParallel tutorial does, an epoch for each message."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=NUM_WORKERS)
    model = DistributedDataParallel(make_model(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    criterion = torch.nn.MSELoss()
    data = make_data(name, num_steps)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler)
    pipe = pipes[rank]
    pipe.send("ready")
    while (epoch := pipe.recv()) is not None:
        sampler.set_epoch(epoch)
        total = 0.0
        model.train()
        for features, target in loader:
            optimizer.zero_grad()
            loss = criterion(model(features), target)
            loss.backward()
            optimizer.step()
            total += loss.item()
        pipe.send(total / len(loader))
    dist.destroy_process_group()


class RawDDP:
    """The hand-written side."""

    def __init__(self, name, num_steps, port):
        self.pipes, ends = zip(*(mp.Pipe() for _ in range(NUM_WORKERS)), strict=True)
        self.context = mp.spawn(
            raw_worker, (name, num_steps, port, ends), nprocs=NUM_WORKERS, join=False
        )
        for pipe in self.pipes:
            pipe.recv()

    def epoch(self, epoch):
        for pipe in self.pipes:
            pipe.send(epoch)
        return statistics.mean(pipe.recv() for pipe in self.pipes)

    def close(self):
        for pipe in self.pipes:
            pipe.send(None)
        self.context.join()


class Regression(TrainingOperator):
    def setup(self, config):
        model = make_model(config["name"])
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
            criterion=torch.nn.MSELoss(),
        )
        data = make_data(config["name"], config["num_steps"])
        torch.manual_seed(0)  # the seed of DistributedSampler
        self.register_data(train_loader=DataLoader(data, batch_size=BATCH_SIZE, shuffle=True))


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


def spread(values):
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
    }


def time_epochs(name, num_steps, runs, port):
    """Return the seconds of each epoch of both sides, in turn."""
    raw = RawDDP(name, num_steps, port)
    times = {"raw": [], "raysgd": []}
    with TorchTrainer(
        training_operator_cls=Regression,
        config={"name": name, "num_steps": num_steps},
        num_workers=NUM_WORKERS,
        min_workers=NUM_WORKERS,
    ) as trainer:
        for epoch in range(runs + 1):
            started = time.perf_counter()
            raw_loss = raw.epoch(epoch)
            middle = time.perf_counter()
            metrics = trainer.train()
            ended = time.perf_counter()
            if abs(metrics["train_loss"] - raw_loss) > 1e-4 * max(1.0, abs(raw_loss)):
                raise SystemExit(f"losses differ: {metrics['train_loss']} and {raw_loss}")
            if epoch > 0:  # the first is a warm-up
                times["raw"].append(middle - started)
                times["raysgd"].append(ended - middle)
    raw.close()
    ratios = [ours / raws for ours, raws in zip(times["raysgd"], times["raw"], strict=True)]
    return {side: spread(seconds) for side, seconds in times.items()} | {"ratio": spread(ratios)}


def time_calls(floats, runs):
    """Return the seconds that a call of one step takes beyond the worker's own loop."""
    beyond = []
    with TorchTrainer(
        training_operator_cls=Floats,
        config={"floats": floats},
        num_workers=NUM_WORKERS,
        min_workers=NUM_WORKERS,
    ) as trainer:
        for _ in range(runs + 3):
            started = time.perf_counter()
            metrics = trainer.train(num_steps=1, profile=True)
            beyond.append(time.perf_counter() - started - metrics["profile"]["mean_train_epoch_s"])
    return spread(beyond[3:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=9, help="counted epochs of each side")
    parser.add_argument("--smoke-test", action="store_true", help="few steps, small models")
    parser.add_argument("--json", type=Path, help="write the result there")
    args = parser.parse_args()
    small = args.smoke_test
    workloads = {"mlp": 20 if small else 400, "resnet": 2 if small else 12}
    sizes = (1_000,) if small else (1_000, 2_500_000, 25_000_000)

    result = {
        "machine": {"cpus": os.cpu_count(), "python": sys.version.split()[0]},
        "versions": {"torch": torch.__version__, "raysgd": raysgd.__version__},
        "epoch": {},
        "call": {},
    }
    print(f"{'epoch of':12}{'raw DDP':>12}{'raysgd':>12}{'ratio':>10}   (min to max)")
    for port, (name, num_steps) in enumerate(workloads.items(), start=29_571):
        row = result["epoch"][name] = time_epochs(name, num_steps, args.runs, port)
        ratio = row["ratio"]
        print(
            f"{name:12}{row['raw']['median']:10.3f} s{row['raysgd']['median']:10.3f} s"
            f"{ratio['median']:10.2f}   ({ratio['min']:.2f} to {ratio['max']:.2f})"
        )
    print(f"\n{'floats':>12}   train(num_steps=1) beyond its step   (min to max)")
    for floats in sizes:
        row = result["call"][floats] = time_calls(floats, 3 * args.runs)
        low, middle, high = (1e3 * row[key] for key in ("min", "median", "max"))
        print(f"{floats:12,}   {middle:26.1f} ms           ({low:.1f} to {high:.1f} ms)")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
