"""Measure what a large state costs: time and memory of training, saving, loading, and failures.

    python examples/benchmarks/large_state.py
    python examples/benchmarks/large_state.py --megabytes 3000 --num-steps 4 --epochs 8
    python examples/benchmarks/large_state.py --num-workers 2 --save --kill
    python examples/benchmarks/large_state.py --num-workers 2 --save --kill --frozen --sides epoch

The state is a perceptron with AdamW. Each side runs in new processes, one side after the other.
"auto", "none", and "epoch" are raysgd with these values of ``snapshot_every``. A side whose package
is missing is skipped. Memory is the peak of a process, ``VmHWM`` of Linux. ``--save`` also compares
``save`` with ``torch.save`` and fsync, and ``load`` with ``torch.load`` and ``load_state_dict``.
Memory is then what each process needs in addition. ``--kill`` also kills workers:

- *next step*: from the SIGKILL to the begin of the next step. If all workers die, new workers start
  and load the snapshot of the begin of the epoch.
- *join pause*: from the last step of the smaller group to the first step with the replacement.
- *repeated*: steps that had finished and that were trained again.
"""

import argparse
import importlib.util
import itertools
import json
import logging
import operator
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _workloads import machine
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from raysgd import ElasticConfig, TorchTrainer, TrainingOperator
from raysgd.testing import chaos

WIDTH = 2048
BATCH_SIZE = 64
SNAPSHOTS = ("auto", "none", "epoch")
SIDES = ("by hand", "DDP by hand", "Lightning", *SNAPSHOTS)
GIVE_UP_S = 300.0


def peak_mb(name="VmHWM"):
    """Return the most memory that this process has used, in megabytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) * 1024 / 1e6


def used_mb():
    """Return the memory that this process uses now, and measure its peak from now on."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_mb("VmRSS")


def make(args):
    """Return a model, its optimizer, and the data of all workers. Both states have this size."""
    torch.manual_seed(0)
    copies = 1 if args["frozen"] else 3  # AdamW has two tensors of its own for each parameter
    num_layers = max(1, round(args["megabytes"] * 1e6 / (copies * 4 * WIDTH * WIDTH)))
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)]
    model = torch.nn.Sequential(*layers)
    features = torch.randn(BATCH_SIZE * args["num_steps"] * args["num_workers"], WIDTH)
    if args["frozen"]:  # an adapter of 0.1 MB behind a frozen base
        model.requires_grad_(False)
        adapter = torch.nn.Sequential(torch.nn.Linear(WIDTH, 8), torch.nn.Linear(8, WIDTH))
        model.append(adapter)
    trained = [each for each in model.parameters() if each.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-4), TensorDataset(features, features)


def timed(function):
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def by_hand(rank, args, is_replicated):
    """Train as PyTorch's tutorials do, with DistributedDataParallel if `is_replicated`."""
    torch.set_num_threads(1)
    model, optimizer, data = make(args)
    criterion, sampler, replica = torch.nn.MSELoss(), None, model
    if is_replicated:
        rendezvous, size = f"file://{args['json']}.rendezvous", args["num_workers"]
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size)
        sampler, replica = DistributedSampler(data, shuffle=False), DistributedDataParallel(model)
    loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler)

    def epoch():
        for features, target in loader:
            optimizer.zero_grad()
            criterion(replica(features), target).backward()
            optimizer.step()

    result = {"epochs_s": [timed(epoch) for _ in range(args["epochs"])], "worker_mb": peak_mb()}
    if args["save"]:
        with tempfile.TemporaryDirectory() as folder:
            state = {"models": model.state_dict(), "optimizers": optimizer.state_dict()}
            path = f"{folder}/state"
            for name, function in (
                ("save", lambda: save_by_hand(state, path)),
                ("load", lambda: load_by_hand(model, optimizer, path)),
            ):
                before = used_mb()
                result[name] = {"seconds": timed(function), "process_mb": peak_mb() - before}
    if rank == 0:
        Path(args["json"]).write_text(json.dumps(result))
    if is_replicated:
        dist.destroy_process_group()


def save_by_hand(state, path):
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def load_by_hand(model, optimizer, path):
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["models"])
    optimizer.load_state_dict(state["optimizers"])


def lightning(args):
    """Train a LightningModule. With two workers, Lightning also starts this script for rank 1."""
    import lightning

    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model, optimizer, data = make(args)
    begins = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.criterion = model, torch.nn.MSELoss()

        def training_step(self, batch, index):
            features, target = batch
            return self.criterion(self.model(features), target)

        def configure_optimizers(self):
            return optimizer

        def on_train_epoch_start(self):
            begins.append(time.perf_counter())

        def on_train_end(self):
            begins.append(time.perf_counter())

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=args["num_workers"],
        strategy="ddp" if args["num_workers"] > 1 else "auto",
        max_epochs=args["epochs"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(data, batch_size=BATCH_SIZE))
    if trainer.is_global_zero:
        epochs_s = [after - before for before, after in itertools.pairwise(begins)]
        Path(args["json"]).write_text(json.dumps({"epochs_s": epochs_s, "worker_mb": peak_mb()}))


class Step(NamedTuple):
    begin: float
    end: float
    number: int
    size: int
    pid: int
    peak_mb: float


class Large(TrainingOperator):
    def setup(self, config):
        model, optimizer, data = make(config)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=torch.nn.MSELoss()
        )
        self.register_data(train_loader=DataLoader(data, batch_size=BATCH_SIZE))

    def train_batch(self, batch, batch_info):
        if "log" not in self.config:
            return super().train_batch(batch, batch_info)
        begun = time.monotonic()
        result = super().train_batch(batch, batch_info)
        size, pid = self.world_size, os.getpid()
        step = [begun, time.monotonic(), self.global_step, size, pid, peak_mb()]
        with open(self.config["log"], "a") as file:
            file.write(f"{json.dumps(step)}\n")
        return result


def make_trainer(args, **config):
    every = None if args["side"] == "none" else args["side"]
    return TorchTrainer(
        training_operator_cls=Large,
        config={**args, **config},
        num_workers=args["num_workers"],
        num_cpus_per_worker=1,
        elastic=ElasticConfig(snapshot_every=every, resize_cooldown_s=0.0),
        initialization_hook=set_threads,
    )


def raysgd(args):
    import ray

    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (as the other sides)
    # One process must not get the cores of the other side.
    ray.init("local", num_cpus=args["num_workers"], include_dashboard=False, log_to_driver=False)
    with make_trainer(args) as trainer:
        result = {"epochs_s": [timed(trainer.train) for _ in range(args["epochs"])]}
        time.sleep(args["rest_s"])  # the driver may still receive a snapshot
        result["worker_mb"] = max(trainer.apply_all_workers(peak_mb))
        result["driver_mb"] = peak_mb()
        if args["save"]:
            with tempfile.TemporaryDirectory() as folder:
                result |= save_and_load(trainer, f"{folder}/state", args)
    if args["kill"] and args["num_workers"] > 1:
        result["kill of one"] = kill(args, [args["num_workers"] - 1])
    if args["kill"] and args["side"] == "epoch":
        result["kill of all"] = kill(args, list(range(args["num_workers"])))
    ray.shutdown()
    Path(args["json"]).write_text(json.dumps(result))


def save_and_load(trainer, path, args):
    """Return the seconds and the additional memory of each call."""
    result = {}
    for name, function in (
        ("save", lambda: trainer.save(path, frozen=not args["frozen"])),
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
    return result


def set_threads():
    os.environ["OMP_NUM_THREADS"] = "1"


def kill(args, ranks):
    """Kill workers in the middle of the second epoch. Return times, repeated steps, and memory."""
    size, log, over = args["num_workers"], Path(f"{args['json']}.steps"), threading.Event()
    log.write_text("")

    def train():
        while not over.is_set():
            trainer.train()

    def await_steps(is_met):
        deadline = time.monotonic() + GIVE_UP_S
        while time.monotonic() < deadline and thread.is_alive():
            lines = log.read_text().split("\n")[:-1]  # a worker may be writing the last one
            steps = sorted(Step(*json.loads(line)) for line in lines)
            if is_met(steps):
                return steps
            time.sleep(0.1)
        raise SystemExit("The workers did not train in time.")

    with make_trainer(args, log=str(log)) as trainer:
        thread = threading.Thread(target=train, daemon=True)
        thread.start()
        await_steps(lambda steps: any(s.number >= 1.5 * args["num_steps"] for s in steps))
        killed = time.monotonic()
        for rank in ranks:
            chaos.kill(trainer, rank)
        steps = await_steps(lambda ss: sum(s.begin > killed and s.size == size for s in ss) > 9)
        over.set()
        thread.join()
    before, after = [s for s in steps if s.end < killed], [s for s in steps if s.begin > killed]
    old, new = {s.pid for s in before}, {s.pid for s in after}
    result = {
        "next_step_s": after[0].begin - killed,
        "repeated": max(s.number for s in before) + 1 - after[0].number,
        "new_mb": max(s.peak_mb for s in after if s.pid not in old),
    }
    if old & new:
        last = max(s.end for s in after if s.size < size)
        joined = min(s.begin for s in after if s.size == size and s.pid in old)
        mine = [s for s in steps if s.pid in old & new]
        result["join_pause_s"] = joined - last
        result["survivor_mb"] = [
            max(s.peak_mb for s in mine if s.end < killed),
            max(s.peak_mb for s in mine if s.begin < joined),
            max(s.peak_mb for s in mine),
        ]
    return result


def run_side(args):
    """Run one side in this process, and write its result to a file."""
    if args["side"] in SNAPSHOTS:
        raysgd(args)
    elif args["side"] == "Lightning":
        lightning(args)
    elif args["side"] == "by hand":
        by_hand(0, args, is_replicated=False)
    else:
        mp.spawn(by_hand, (args, True), nprocs=args["num_workers"])


def _rounded(value):
    return list(map(round, value)) if isinstance(value, list) else f"{value:.{2 * (value < 100)}f}"


def shown(row):
    """Return a line with the figures of a side. The first epoch includes the start."""
    first, *others = row["epochs_s"]
    figures = [f"{statistics.mean(others):7.2f} s{first:8.2f} s{row['worker_mb']:7.0f} MB"]
    figures.append(f"{row['driver_mb']:7.0f} MB" if "driver_mb" in row else " " * 10)
    for what in ("save", "load", "get_model", "kill of one", "kill of all"):
        if what in row:
            values = ", ".join(f"{name} {_rounded(value)}" for name, value in row[what].items())
            figures.append(f"\n{'':12}{what}: {values}")
    return " ".join(figures)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=400, help="size of the state")
    parser.add_argument("--num-steps", type=int, default=20, help="steps of an epoch")
    parser.add_argument("--epochs", type=int, default=24, help='enough for a snapshot of "auto"')
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--rest-s", type=float, default=2.0, help="wait before memory is read")
    parser.add_argument("--save", action="store_true", help="also save and load")
    parser.add_argument("--kill", action="store_true", help="also kill workers")
    parser.add_argument("--frozen", action="store_true", help="train only a small adapter")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--smoke-test", action="store_true", help="a small state, two epochs")
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.smoke_test:
        args.megabytes, args.num_steps, args.epochs, args.rest_s = 50, 2, 2, 0.0
    options = {**vars(args), "json": str(args.json)}
    if args.side:
        run_side(options)
        return
    rows = {}
    print(f"state of {args.megabytes} MB, {args.num_workers} workers, {args.num_steps} steps")
    print(f"{'':12}{'epoch':>9} {'(first)':>9} {'worker':>9} {'driver':>9}")
    for side in args.sides:
        if side == "by hand" and args.num_workers > 1:
            continue
        if side == "Lightning" and importlib.util.find_spec("lightning") is None:
            print("Lightning is not installed. `make bench` installs it.")
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "result.json")
            command = [sys.executable, *sys.argv, "--side", side, "--json", str(path)]
            subprocess.run(command, check=True)
            rows[side] = json.loads(path.read_text())
        print(f"{side:12}{shown(rows[side])}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"args": options, "machine": machine(), "rows": rows}))


if __name__ == "__main__":
    main()
