"""Plant causes of slow training, and compare them with the sentence of ``trainer.speed()``.

    python -m tests.why_slow                      # all causes and a healthy run, three times each
    python -m tests.why_slow --only cpu --runs 1

Run it on an idle machine. The cause *link* needs root and iproute2. The case *change* makes the
loader slow for some time, and compares the events. All cases take about fifteen minutes.
"""

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import fsspec
import ray
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch.utils.data import DataLoader, Dataset

from raysgd import TorchTrainer, TrainingOperator
from raysgd.callbacks import CheckpointCallback
from tests.hosts.network import Hosts, why_not

NUM_WORKERS = 2
TRAIN_S = 6.0
SENTENCES = {
    "healthy": "$",
    "loader": r"\d+ % of the step waits for data on all workers since step .*num_workers=0",
    "one loader": r"Worker 1 on .* waits for data .*num_workers=0",
    "cpu": r"Worker 1 on .* computes \d\.\d times longer than the others",
    "link": r".* waits for gradients since .*, because worker \d on 10\.123\.0\.4 sends ",
    "disk": r"\d+ % of the time goes into checkpoints and snapshots since",
    "printing": r"\d+ % of the step is code outside of forward, backward, and optimizer on all",
    "change": r"slow: data takes \d{2,}\.\d ms per step, and usually \d\.\d ms; recovered: data",
}


class Samples(Dataset):
    """Random samples, each of which takes `sleep_s`, or only while the file `switch` exists."""

    def __init__(self, sleep_s, switch):
        self.sleep_s, self.switch = sleep_s, switch

    def __len__(self):
        return 20_000

    def __getitem__(self, index):
        if self.sleep_s and (self.switch is None or self.switch.exists()):
            time.sleep(self.sleep_s)
        generator = torch.Generator().manual_seed(index)
        features = torch.randn(64, generator=generator)
        return features, features[:1]


class Planted(TrainingOperator):
    """A model whose training is slow because of ``config["cause"]``."""

    def setup(self, config):
        self.cause, is_slow = config["cause"], self.world_rank == 1
        torch.manual_seed(0)
        width = 1024
        model = torch.nn.Sequential(
            torch.nn.Linear(64, width),
            torch.nn.ReLU(),
            torch.nn.Linear(width, width),
            torch.nn.ReLU(),
            torch.nn.Linear(width, 1),
        )
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
            criterion=torch.nn.MSELoss(),
        )
        slow_loader = self.cause in ("loader", "change") or (self.cause == "one loader" and is_slow)
        samples = Samples(0.002 if slow_loader else 0.0, config["switch"])
        self.register_data(train_loader=DataLoader(samples, batch_size=32))
        if self.cause == "cpu":
            core = self.world_rank % os.cpu_count()
            for thread in os.listdir("/proc/self/task"):
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(int(thread), {core})
            if is_slow:
                for _ in range(4):
                    command = [sys.executable, "-c", "while True: pass"]
                    process = subprocess.Popen(command)
                    os.sched_setaffinity(process.pid, {core})
                    self.register_cleanup(process)

    def register_cleanup(self, process):
        command = "import os,sys,time\nwhile os.path.exists('/proc/'+sys.argv[1]): time.sleep(.2)\n"
        command += "os.kill(int(sys.argv[2]), 9)"
        arguments = [sys.executable, "-c", command, str(os.getpid()), str(process.pid)]
        subprocess.Popen(arguments, start_new_session=True)

    def train_batch(self, batch, batch_info):
        metrics = super().train_batch(batch, batch_info)
        if self.cause == "printing":
            for parameter in self.model.parameters():
                print(parameter.flatten()[:1000].tolist(), metrics["train_loss"].item())
        return metrics


class SlowDisk(MemoryFileSystem):
    """Files ``slow://...``, which take a second to open for writing."""

    protocol = "slow"

    def _open(self, path, mode="rb", **options):
        if "w" in mode:
            time.sleep(1.0)
        return super()._open(path, mode, **options)


def train(cause, num_workers, switch=None):
    """Train with a planted cause, and return the report, or the events of a change."""
    fsspec.register_implementation("slow", SlowDisk)
    callbacks = [CheckpointCallback("slow://checkpoints", every=25)] if cause == "disk" else []
    with TorchTrainer(
        training_operator_cls=Planted,
        num_workers=num_workers,
        config={"cause": cause, "switch": switch},
        callbacks=callbacks,
    ) as trainer:
        trainer.train(num_steps=20)
        if switch is None:
            train_until(trainer, TRAIN_S)
            return trainer.speed()
        train_until(trainer, 40.0)
        switch.touch()
        train_until(trainer, 40.0, "slow")
        switch.unlink()
        train_until(trainer, 40.0, "recovered")
        events = [each for each in trainer.events if each.kind in ("slow", "recovered")]
        return f"{trainer.speed()}\n" + "; ".join(f"{e.kind}: {e.cause}" for e in events)


def train_until(trainer, seconds, event=None):
    """Train for some seconds, or until there is an event."""
    ends = time.time() + seconds
    while time.time() < ends and event not in [each.kind for each in trainer.events]:
        trainer.train(num_steps=20)


def on_hosts(cause):
    """Run this script on hosts, one of which has a slow connection. Return its output."""
    with Hosts([0, 1, 1, 1]) as hosts:
        hosts.slow_down(3, "100mbit")
        command = [sys.executable, "-m", "tests.why_slow", "--here", cause]
        driver = hosts.spawn(0, command, stdout=subprocess.PIPE, text=True)
        output, _ = driver.communicate(timeout=120)
        return output


def in_process(cause):
    command = [sys.executable, "-m", "tests.why_slow", "--here", cause]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def here(cause):
    """Train in this process, and print the report."""
    if cause == "link":
        ray.init(_node_ip_address=os.environ["RAY_ADDRESS"].split(":")[0], log_to_driver=False)
    else:
        ray.init("local", num_cpus=NUM_WORKERS, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        switch = Path(folder) / "slow" if cause == "change" else None
        print(train(cause, 3 if cause == "link" else NUM_WORKERS, switch))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SENTENCES, default=list(SENTENCES))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--here", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        here(args.here)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    num_wrong = 0
    for cause in args.only:
        if cause == "link" and (reason := why_not()):
            print(f"skipped: {reason}")
            continue
        for run in range(args.runs):
            output = on_hosts(cause) if cause == "link" else in_process(cause)
            *table, last = output.rstrip().splitlines()
            sentence = "" if last.startswith("worker ") else last
            is_right = re.match(SENTENCES[cause], sentence) is not None
            num_wrong += not is_right
            print(f"{cause}, run {run}: {'right' if is_right else 'WRONG'}")
            print("\n".join([*table, last]), flush=True)
    raise SystemExit(num_wrong)


if __name__ == "__main__":
    main()
