"""Measure the cost of worker failures and of growth, to the millisecond.

    python examples/benchmarks/recovery.py
    python examples/benchmarks/recovery.py --num-workers 3 --runs 9 --json recovery.json

Each worker appends a line to its own file after each update: time, step, and number of workers. All
figures come from these lines and the time of the SIGKILL, on the machine's monotonic clock. They do
not use any report of raysgd. The model is a ledger with one parameter per sample. At the end, it
must show that each sample was used exactly once per epoch.

Failures are timed in two situations: ``settled``, some time after the group had its full size, as
in a long run, and ``just started``.

- *next step*: from the SIGKILL to the first step that the survivors finish as a smaller group.
- *full size*: from the SIGKILL, or from the time when resources appear, to the first step that all
  workers finish together again.
- *growth pause*: from the last step of the smaller group to the first step of the larger group.
- *redone*: steps that a worker had finished and that were trained again.

A worker whose preemption is announced with ``trainer.drain`` moves if there are free resources:

- *moved*: from the announcement to the first step with its replacement.
- *pause*: the longest time without a step until then.

As root on Linux, it also compares raysgd with Ray Train on separate hosts (network namespaces) that
lose power or are drained (`tests/hosts/measure.py`).
"""

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import ray
import torch
from _workloads import machine, spread
from ray.util.placement_group import placement_group, remove_placement_group
from torch.utils.data import DataLoader, Dataset

from raysgd import ElasticConfig, TorchTrainer, TrainingOperator
from raysgd.testing import chaos
from raysgd.utils import BATCH_SIZE

GLOBAL_BATCH = 48  # divisible by 2, 3, and 4 workers
NUM_STEPS = 500  # per epoch
GIVE_UP_S = 120.0
MOST_HOSTS = 3  # runs per side: Ray takes a minute to detect a host without power


class Ids(Dataset):
    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        return index


class Counts(torch.nn.Module):
    def __init__(self, num_samples):
        super().__init__()
        self.counts = torch.nn.Parameter(torch.zeros(num_samples))

    def forward(self, ids):
        return self.counts[ids]


class Recorder(TrainingOperator):
    """Trains a ledger, and records the time of each step."""

    def setup(self, config):
        model = Counts(config["num_samples"])
        self.model, self.optimizer = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=1.0)
        )
        data = Ids(config["num_samples"])
        self.register_data(
            train_loader=DataLoader(data, batch_size=config[BATCH_SIZE], shuffle=True)
        )
        self.log = open(Path(config["folder"]) / f"{os.getpid()}.txt", "a", buffering=1)  # noqa: SIM115

    def train_batch(self, batch, batch_info):
        time.sleep(self.config["step_s"])
        loss = -self.model(batch).sum() * self.world_size
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.log.write(f"{time.monotonic()} {self.global_step + 1} {self.world_size}\n")
        return {"num_samples": len(batch)}


class Records:
    """The steps that the workers have recorded. Reads each line once."""

    def __init__(self, folder):
        self._folder = Path(folder)
        self._read = {}
        self._steps = []

    def steps(self):
        """Return all steps of all workers as (time, step, number of workers), sorted by time."""
        for path in self._folder.iterdir():
            with path.open() as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            # The last line may be incomplete.
            whole = text[: text.rfind("\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.splitlines():
                moment, step, world_size = line.split()
                self._steps.append((float(moment), int(step), int(world_size)))
        self._steps.sort()
        return list(self._steps)


def change(steps, begin, before, after):
    """Return the last step of `before` workers since `begin`, and the first step of `after`.

    Each is None if there is no such step.
    """
    first = next((s for s in steps if s[0] >= begin and s[2] == after), None)
    until = math.inf if first is None else first[0]
    last = [s for s in steps if begin <= s[0] < until and s[2] == before]
    return (last[-1] if last else None), first


def redone(steps, first):
    """Return the number of steps that a generation starting with step `first` repeated."""
    return max([0, *(s[1] for s in steps if s[0] < first[0])]) + 1 - first[1]


class Job:
    """A trainer, its records, and a thread that trains until it is stopped."""

    def __init__(self, num_workers, step_s):
        self._folder = tempfile.TemporaryDirectory()
        self._records = Records(self._folder.name)
        self.num_workers = num_workers
        self.trainer = TorchTrainer(
            training_operator_cls=Recorder,
            config={
                "num_samples": NUM_STEPS * GLOBAL_BATCH,
                "step_s": step_s,
                "folder": self._folder.name,
                BATCH_SIZE: GLOBAL_BATCH,
            },
            num_workers=num_workers,
            use_gpu=False,
            elastic=ElasticConfig(resize_cooldown_s=0.0),
        )
        self.error = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._train)

    def _train(self):
        try:
            while not self._over.is_set():
                self.trainer.train()
        except BaseException as error:
            self.error = error

    def await_steps(self, world_size, num_steps, begin=0.0):
        """Wait for `num_steps` steps of a group of that size since `begin`. Return all steps."""
        deadline = time.monotonic() + GIVE_UP_S
        while True:
            steps = self._records.steps()
            if len({s[1] for s in steps if s[0] >= begin and s[2] == world_size}) >= num_steps:
                return steps
            if self.error is not None:
                raise self.error
            if time.monotonic() > deadline:
                raise SystemExit(f"no {num_steps} steps with {world_size} workers in time")
            time.sleep(0.1)  # the workers need the processor

    def await_event(self, kind, number):
        """Wait for `number` events of a kind."""
        deadline = time.monotonic() + GIVE_UP_S
        while sum(event.kind == kind for event in self.trainer.events) < number:
            if self.error is not None:
                raise self.error
            if time.monotonic() > deadline:
                raise SystemExit(f"no event {kind!r} in time")
            time.sleep(0.1)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._over.set()
        self._thread.join()
        if error[0] is None and self.error is None:
            self._check()
        self.trainer.shutdown()
        self._folder.cleanup()

    def _check(self):
        ledger = self.trainer.get_model().counts.detach()
        if self.trainer.global_step * GLOBAL_BATCH != int(ledger.sum()) or not bool(
            (ledger == self.trainer.epoch).all()
        ):
            raise SystemExit("the ledger shows samples that were lost or repeated")


def time_losses(num_workers, runs, step_s, settle_s):
    """Kill one worker per run, and return the figures of each failure."""
    figures = []
    with Job(num_workers, step_s) as job:
        for run in range(runs):
            job.await_steps(num_workers, 50, time.monotonic() + settle_s)
            rank = (num_workers - 1, 0)[run % 2]  # the last rank, and the leader
            killed = time.monotonic()
            chaos.kill(job.trainer, rank)
            smaller = num_workers - 1
            steps = job.await_steps(smaller, 1, killed)
            _, first = change(steps, killed, num_workers, smaller)
            steps = job.await_steps(num_workers, 5, first[0])
            last, full = change(steps, first[0], smaller, num_workers)
            figures.append(
                {
                    "next_step_s": first[0] - killed,
                    "full_size_s": full[0] - killed,
                    "join_pause_s": full[0] - last[0],
                    "redone": redone(steps, first) + redone(steps, full),
                }
            )
    return figures


def time_growths(num_workers, runs, step_s):
    """Start without one worker, release its CPU, and return the figures of each growth."""
    figures = []
    for _ in range(runs):
        taken = placement_group([{"CPU": ray.cluster_resources()["CPU"] - num_workers + 1}])
        ray.get(taken.ready())
        with Job(num_workers, step_s) as job:
            job.await_steps(num_workers - 1, 50)
            freed = time.monotonic()
            remove_placement_group(taken)
            steps = job.await_steps(num_workers, 5)
            last, full = change(steps, 0.0, num_workers - 1, num_workers)
            figures.append(
                {
                    "full_size_s": full[0] - freed,
                    "growth_pause_s": full[0] - last[0],
                    "redone": redone(steps, full),
                }
            )
    return figures


def time_moves(num_workers, runs, step_s):
    """Announce a preemption per run, and return the figures of each move."""
    figures = []
    with Job(num_workers, step_s) as job:
        for run in range(runs):
            job.await_steps(num_workers, 50, time.monotonic())
            begun = time.monotonic()
            job.trainer.drain(rank=run % num_workers, deadline_s=GIVE_UP_S)
            job.await_event("drained", run + 1)
            steps = job.await_steps(num_workers, 5, time.monotonic())
            times = [begun, *(moment for moment, _, _ in steps if moment > begun)]
            pause_s, moved = max((b - a, b) for a, b in itertools.pairwise(times))
            first = next(step for step in steps if step[0] == moved)
            figures.append(
                {
                    "moved_s": moved - begun,
                    "pause_s": pause_s,
                    "redone": max(0, redone(steps, first)),
                }
            )
    return figures


def time_hosts(runs):
    """Remove hosts from raysgd and from Ray Train. Return the figures by side and fault.

    If such hosts are impossible, print the reason and return nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hosts.json"
        command = [sys.executable, "-m", "tests.hosts.measure", "--json", str(path)]
        command += ["--runs", str(runs), "--only", "power off", "drain, room elsewhere"]
        subprocess.run(command, cwd=Path(__file__).parents[2], check=False)
        sides = json.loads(path.read_text()) if path.exists() else {}
    return {
        side: {fault: summary(figures) for fault, figures in faults.items()}
        for side, faults in sides.items()
    }


def summary(figures):
    return {name: spread([run[name] for run in figures]) for name in figures[0]}


def shown(figure):
    return f"{figure['median']:6.3f} ({figure['min']:.3f} to {figure['max']:.3f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, nargs="+", choices=(2, 3, 4), default=(2, 3, 4))
    parser.add_argument("--runs", type=int, default=5, help="losses, and growths, of each size")
    parser.add_argument("--step-s", type=float, default=0.01, help="work of one step, in seconds")
    parser.add_argument("--settle-s", type=float, default=15.0, help="seconds before each loss")
    parser.add_argument("--smoke-test", action="store_true", help="two workers, one run")
    parser.add_argument("--json", type=Path, help="write the result there")
    args = parser.parse_args()
    sizes, runs = ((2,), 1) if args.smoke_test else (args.num_workers, args.runs)
    moments = (
        {"just started": 0.0}
        if args.smoke_test
        else {"settled": args.settle_s, "just started": 0.0}
    )

    # There may be fewer CPUs, but the workers mostly sleep.
    ray.init("local", num_cpus=max(5, os.cpu_count()), include_dashboard=False, log_to_driver=False)
    result = {
        "machine": machine(),
        "runs": runs,
        "loss": {},
        "growth": {},
        "move": {},
    }
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, {runs} runs a row")
    print("seconds: median (min to max); each includes the time of one step\n")
    for moment, settle_s in moments.items():
        head = f"a loss, {moment}"
        print(f"{head:17}{'next step':>24}{'full size':>24}{'join pause':>24}{'redone':>9}")
        result["loss"][moment] = {}
        for size in sizes:
            row = summary(time_losses(size, runs, args.step_s, settle_s))
            result["loss"][moment][size] = row
            print(
                f"{size} workers        {shown(row['next_step_s']):>24}"
                f"{shown(row['full_size_s']):>24}{shown(row['join_pause_s']):>24}"
                f"{row['redone']['max']:9}"
            )
    print(f"\n{'a growth':17}{'full size':>24}{'growth pause':>24}{'redone':>9}")
    for size in sizes:
        row = result["growth"][size] = summary(time_growths(size, runs, args.step_s))
        print(
            f"{size - 1} to {size}           {shown(row['full_size_s']):>24}"
            f"{shown(row['growth_pause_s']):>24}{row['redone']['max']:9}"
        )
    print(f"\n{'a worker moves':17}{'moved':>24}{'pause':>24}{'redone':>9}")
    for size in sizes:
        row = result["move"][size] = summary(time_moves(size, runs, args.step_s))
        print(
            f"{size} workers        {shown(row['moved_s']):>24}{shown(row['pause_s']):>24}"
            f"{row['redone']['max']:9}"
        )
    if not args.smoke_test:
        ray.shutdown()
        print("\nhosts that are lost or drained", flush=True)
        result["hosts"] = time_hosts(min(runs, MOST_HOSTS))
    print(f"\nload {os.getloadavg()[0]:.1f} at the end")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
