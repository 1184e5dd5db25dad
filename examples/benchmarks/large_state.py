"""Compare time and memory of a loop by hand and raysgd with and without snapshots.

    python examples/benchmarks/large_state.py
    python examples/benchmarks/large_state.py --megabytes 3000 --num-steps 4 --epochs 8
    python examples/benchmarks/large_state.py --num-workers 2 --save

The state is a perceptron with AdamW. Each side runs in a new process, one after the other. Memory
is the peak of the process, ``VmHWM`` of Linux. ``--save`` also compares ``save`` with
``torch.save`` and ``fsync``, and ``load`` with ``torch.load`` and ``load_state_dict``. Memory is
then what each process needs in addition.
"""

import argparse
import json
import operator
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, TorchTrainer, TrainingOperator

WIDTH = 2048
BATCH_SIZE = 64
SIDES = ("by hand", "auto", "none")
"""By hand, and raysgd with each of these values of ``snapshot_every``. "epoch" is another one."""


def peak_mb(name="VmHWM"):
    """Return the most memory that this process has used, in megabytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) * 1024 / 1e6


def used_mb():
    """Return the memory that this process uses now, and measure its peak from now on."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_mb("VmRSS")


def make(megabytes, num_steps):
    """Return a model whose state has this size with AdamW, an optimizer, and a loader."""
    torch.manual_seed(0)
    num_layers = max(1, round(megabytes * 1e6 / (3 * 4 * WIDTH * WIDTH)))
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)]
    model = torch.nn.Sequential(*layers)
    features = torch.randn(BATCH_SIZE * num_steps, WIDTH)
    data = DataLoader(TensorDataset(features, features), batch_size=BATCH_SIZE)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4), data


class Large(TrainingOperator):
    def setup(self, config):
        model, optimizer, data = make(config["megabytes"], config["num_steps"])
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=torch.nn.MSELoss()
        )
        self.register_data(train_loader=data)


def timed(function):
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def by_hand(args):
    model, optimizer, data = make(args.megabytes, args.num_steps)
    criterion = torch.nn.MSELoss()

    def epoch():
        for features, target in data:
            optimizer.zero_grad()
            criterion(model(features), target).backward()
            optimizer.step()

    result = {"epochs_s": [timed(epoch) for _ in range(args.epochs)], "worker_mb": peak_mb()}
    if args.save:
        with tempfile.TemporaryDirectory() as folder:
            state = {"models": model.state_dict(), "optimizers": optimizer.state_dict()}
            path = f"{folder}/state"
            for name, function in (
                ("save", lambda: save_by_hand(state, path)),
                ("load", lambda: load_by_hand(model, optimizer, path)),
            ):
                before = used_mb()
                result[name] = {"seconds": timed(function), "process_mb": peak_mb() - before}
    return result


def save_by_hand(state, path):
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def load_by_hand(model, optimizer, path):
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["models"])
    optimizer.load_state_dict(state["optimizers"])


def raysgd(args):
    import ray

    # One process must not get the cores of the other side.
    ray.init("local", num_cpus=args.num_workers, include_dashboard=False, log_to_driver=False)
    every = None if args.side == "none" else args.side
    trainer = TorchTrainer(
        training_operator_cls=Large,
        config=vars(args),
        num_workers=args.num_workers,
        num_cpus_per_worker=1,
        elastic=ElasticConfig(snapshot_every=every),
        initialization_hook=set_threads,
    )
    result = {"epochs_s": [timed(trainer.train) for _ in range(args.epochs)]}
    time.sleep(args.rest_s)  # a snapshot may still be on its way
    result["worker_mb"] = max(trainer.apply_all_workers(peak_mb))
    result["driver_mb"] = peak_mb()
    if args.save:
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/state"
            for name, function in (
                ("save", lambda: trainer.save(path)),
                ("load", lambda: trainer.load(path)),
                ("get_model", trainer.get_model),
            ):
                of_workers, of_driver = trainer.apply_all_workers(used_mb), used_mb()
                seconds, peaks = timed(function), trainer.apply_all_workers(peak_mb)
                result[name] = {
                    "seconds": seconds,
                    "worker_mb": max(map(operator.sub, peaks, of_workers)),
                    "driver_mb": peak_mb() - of_driver,
                    "kept_mb": peak_mb("VmRSS") - of_driver,
                }
    trainer.shutdown()
    ray.shutdown()
    return result


def set_threads():
    os.environ["OMP_NUM_THREADS"] = "1"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=400, help="size of the state")
    parser.add_argument("--num-steps", type=int, default=20, help="steps of an epoch")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--rest-s", type=float, default=2.0, help="wait before memory is read")
    parser.add_argument("--save", action="store_true", help="also save and load")
    parser.add_argument("--sides", nargs="+", default=SIDES)
    parser.add_argument("--smoke-test", action="store_true", help="a small state, two epochs")
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.smoke_test:
        args.megabytes, args.num_steps, args.epochs, args.rest_s = 50, 2, 2, 0.0
    if args.side:
        torch.set_num_threads(1)
        run = by_hand if args.side == "by hand" else raysgd
        args.json.write_text(json.dumps(run(argparse.Namespace(**{**vars(args), "json": None}))))
        return
    rows = {}
    print(f"state of {args.megabytes} MB, {args.num_workers} workers, {args.num_steps} steps")
    print(f"{'':10}{'epoch':>9}{'(first)':>10}{'worker':>10}{'driver':>10}")
    for side in args.sides:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "result.json")
            options = ["--side", side, "--json", str(path)]
            subprocess.run([sys.executable, *sys.argv, *options], check=True)
            row = rows[side] = json.loads(path.read_text())
        first, *others = row["epochs_s"]
        print(
            f"{side:10}{statistics.mean(others):7.2f} s{first:8.2f} s{row['worker_mb']:7.0f} MB"
            f"{row.get('driver_mb', 0):7.0f} MB",
            flush=True,
        )
        for name in ("save", "load", "get_model"):
            found = dict(row.get(name, {}))
            memory = ", ".join(f"{key} {value:.0f}" for key, value in list(found.items())[1:])
            if found:
                print(f"  {name:10}{found['seconds']:6.2f} s   {memory}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"args": {**vars(args), "json": None}, "rows": rows}))


if __name__ == "__main__":
    main()
