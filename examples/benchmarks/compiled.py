"""Measure how long other workers pause when a replacement joins, with and without compilation.

    python examples/benchmarks/compiled.py
    python examples/benchmarks/compiled.py --runs 20 --json compiled.json

Two workers train a residual network. One of them is killed and replaced in each run. Each process
has an empty folder for the compiler cache, as on its own host. *Standstill* is the longest time
between two steps of the other worker, from ten steps before the group is complete again to ten
steps after. *Full size* is the time from the SIGKILL to the first step of both.
"""

import argparse
import itertools
import json
import os
import tempfile
import threading
import time
from pathlib import Path

import ray
from _peers import Regression
from _workloads import machine, spread

from raysgd import ElasticConfig, TorchTrainer
from raysgd.testing import chaos

NUM_AROUND = 10
GIVE_UP_S = 300.0


class Timed(Regression):
    """Records the time of each step."""

    def setup(self, config):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(dir=config["folder"])
        super().setup(config)
        self.log = open(Path(config["folder"]) / f"{os.getpid()}.txt", "a", buffering=1)  # noqa: SIM115

    def train_batch(self, batch, batch_info):
        metrics = super().train_batch(batch, batch_info)
        self.log.write(f"{time.monotonic()} {self.world_size}\n")
        return metrics


class Job:
    """A trainer, and a thread that trains until it is stopped."""

    def __init__(self, compiled):
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.trainer = TorchTrainer(
            training_operator_cls=Timed,
            config={
                "name": "resnet",
                "num_steps": 200,
                "compiled": compiled,
                "folder": self._folder.name,
            },
            num_workers=2,
            elastic=ElasticConfig(resize_cooldown_s=0.0),
        )
        self.stays = self.trainer.apply_all_workers(os.getpid)[0]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._train)

    def _train(self):
        while not self._over.is_set():
            self.trainer.train(max_retries=10**6)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._over.set()
        self._thread.join()
        self.trainer.shutdown()
        self._folder.cleanup()

    def await_steps(self, num_steps, begin=0.0):
        """Wait for `num_steps` steps of two workers since `begin`. Return the survivor's steps."""
        path = Path(self._folder.name) / f"{self.stays}.txt"
        deadline = time.monotonic() + GIVE_UP_S
        while time.monotonic() < deadline:
            lines = path.read_text().splitlines()[:-1] if path.exists() else []
            steps = [(float(moment), int(size)) for moment, size in map(str.split, lines)]
            if sum(size == 2 and moment >= begin for moment, size in steps) >= num_steps:
                return steps
            time.sleep(0.1)  # the workers need the processor
        raise SystemExit(f"no {num_steps} steps of two workers within {GIVE_UP_S:g} s")


def time_joins(compiled, runs):
    standstills, full_sizes = [], []
    with Job(compiled) as job:
        job.await_steps(5 * NUM_AROUND)
        for _ in range(runs):
            killed = time.monotonic()
            chaos.kill(job.trainer, 1)
            steps = job.await_steps(5 * NUM_AROUND, killed + 0.5)
            first = next(i for i, (t, size) in enumerate(steps) if t > killed + 0.5 and size == 2)
            near = [moment for moment, _ in steps[first - NUM_AROUND : first + NUM_AROUND]]
            standstills.append(max(b - a for a, b in itertools.pairwise(near)))
            full_sizes.append(steps[first][0] - killed)
    return {"standstill": spread(standstills), "full size": spread(full_sizes)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20, help="joins of each kind")
    parser.add_argument("--smoke-test", action="store_true", help="one join of each kind")
    parser.add_argument("--json", type=Path, help="write the result there")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    result = {"machine": machine(), "compiled": {}}
    for name in ("eager", "compiled"):
        rows = time_joins(name == "compiled", 1 if args.smoke_test else args.runs)
        result["compiled"][name] = rows
        for what, figure in rows.items():
            print(
                f"{name:10}{what:12}{figure['median']:8.3f} s   "
                f"({figure['min']:.3f} to {figure['max']:.3f})",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
