"""Measure what each fault of a host costs raysgd and Ray Train.

    python -m tests.hosts.measure            # as root; about twenty minutes
    python -m tests.hosts.measure --only cut --sides raysgd

Three workers train in steps of 20 ms. Their hosts are network namespaces of this machine. A row
shows the longest time without a step and the number of repeated steps. The events and the log of
the driver follow. Ray Train runs a function that saves a checkpoint on rank 0 every 100 steps.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.conftest import wait_until
from tests.hosts.drive import STEP_S
from tests.hosts.network import Hosts, why_not
from tests.hosts.test_hosts import Run

ROOM, NO_ROOM = [0, 1, 1, 2], [0, 1, 1, 1]
"""Number of CPUs of each host, with and without room for a replacement."""
NUM_WORKERS = 3
SAVE_EVERY = 100
RECOVER_S = 300.0


class RaysgdRun(Run):
    """A raysgd trainer with the default `driver_grace_s`."""

    WORKER = "ray::Worker"

    def __init__(self, hosts):
        super().__init__(hosts, grace_s=60.0, num_workers=NUM_WORKERS)

    def said(self, events):
        """Return the events as lines of text."""
        return [f"{kind}: {cause}" for kind, cause in events]


class RayTrainRun(Run):
    """A training function under Ray Train."""

    WORKER = "ray::RayTrainWorker"

    def __init__(self, hosts):
        self.hosts = hosts
        self.folder = hosts.folder / "steps"
        self.folder.mkdir(exist_ok=True)
        self.log = hosts.folder / "driver.log"
        self._errors = self.log.open("w")
        self._read, self._steps = {}, []
        command = [sys.executable, "-m", "tests.hosts.measure", "--ray-train", str(self.folder)]
        self._process = hosts.spawn(0, command, stdout=self._errors, stderr=self._errors)

    def close(self):
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def train(self):
        began = time.time()
        wait_until(lambda: len(self.steps(began)) > 1.5 * SAVE_EVERY * NUM_WORKERS, RECOVER_S)

    def end(self):
        assert self._process.poll() is None, self.log.read_text()[-3000:]
        return []

    def said(self, events):
        return []


def ray_train(folder):
    """Run the driver of Ray Train until it is killed."""
    import ray
    from ray import train
    from ray.train.torch import TorchTrainer

    ray.init(runtime_env={"env_vars": {"GLOO_SOCKET_IFNAME": "eth0"}}, log_to_driver=False)
    TorchTrainer(
        _train,
        train_loop_config={"folder": folder},
        scaling_config=train.ScalingConfig(num_workers=NUM_WORKERS, placement_strategy="SPREAD"),
        run_config=train.RunConfig(
            storage_path=folder, failure_config=train.FailureConfig(max_failures=-1)
        ),
    ).fit()


def _train(config):
    import torch
    from ray import train
    from ray.train.torch import prepare_model

    context, step = train.get_context(), 0
    model = prepare_model(torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if (checkpoint := train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            step = int(Path(folder, "step").read_text())
    with open(os.path.join(config["folder"], f"steps-{os.getpid()}"), "a", buffering=1) as log:
        while True:
            time.sleep(STEP_S)
            optimizer.zero_grad()
            model(torch.randn(4, 32)).mean().backward()
            optimizer.step()
            step += 1
            log.write(json.dumps([time.time(), context.get_world_size(), step]) + "\n")
            if step % SAVE_EVERY == 0:
                with tempfile.TemporaryDirectory() as folder:
                    Path(folder, "step").write_text(str(step))
                    is_first = context.get_world_rank() == 0
                    saved = train.Checkpoint.from_directory(folder) if is_first else None
                    train.report({"step": step}, checkpoint=saved)


def cut_for(seconds, host=None):
    """Return a fault that cuts off a host, by default one with a single worker."""

    def fault(run, host=host):
        host = alone(run)[0] if host is None else host
        run.hosts.cut(host)
        time.sleep(seconds)
        run.hosts.heal(host)

    return fault


def power_off(run):
    run.hosts.power_off(3)
    time.sleep(60 if isinstance(run, RayTrainRun) else 10)  # Ray Train gets the next node late
    run.hosts.heal(3)
    run.hosts.start_ray(3)


def stop_head(run):
    (head,) = run.hosts.processes(0, "gcs_server")
    head.send_signal(signal.SIGSTOP)
    time.sleep(20)
    head.send_signal(signal.SIGCONT)


def alone(run):
    """Return a host that has a single worker, and the worker."""
    for host in (1, 2, 3):
        if len(workers := run.hosts.processes(host, run.WORKER)) == 1:
            return host, workers[0]
    raise AssertionError("no host has one worker")


def terminate(run):
    _, worker = alone(run)
    worker.send_signal(signal.SIGTERM)
    wait_until(lambda: not worker.is_running(), 40)


def drain(*hosts, notice_s=15):
    """Return a fault that drains hosts (default: one with a single worker), then cuts the power."""

    def fault(run):
        drained = hosts or (alone(run)[0],)
        for host in drained:
            run.hosts.drain(host, notice_s)
        time.sleep(notice_s)
        for host in drained:
            run.hosts.power_off(host)
        for host in drained:
            run.hosts.heal(host)
            run.hosts.start_ray(host)

    return fault


FAULTS = {
    "cut for 1 s": (ROOM, cut_for(1)),
    "cut for 2 s": (ROOM, cut_for(2)),
    "cut for 2.5 s": (ROOM, cut_for(2.5)),
    "cut for 5 s": (ROOM, cut_for(5)),
    "cut for 20 s": (ROOM, cut_for(20)),
    "cut for 90 s": (ROOM, cut_for(90)),
    "power off": (ROOM, power_off),
    "driver's host cut off for 5 s": (ROOM, cut_for(5, 0)),
    "driver's host cut off for 20 s": (ROOM, cut_for(20, 0)),
    "Ray's head stopped for 20 s": (ROOM, stop_head),
    "SIGTERM to a worker": (ROOM, terminate),
    "drain, room elsewhere": (ROOM, drain()),
    "drain, no room elsewhere": (NO_ROOM, drain()),
    "drain of all nodes": (NO_ROOM, drain(1, 2, 3)),
}
SIDES = {"raysgd": RaysgdRun, "Ray Train": RayTrainRun}


def measure(side, faults):
    """Print a row for each fault. Return the figures of the survived faults, by name.

    Faults that need the same numbers of CPUs share the hosts.
    """
    figures = {}
    for cpus in (ROOM, NO_ROOM):
        names = [name for name in faults if FAULTS[name][0] is cpus]
        while names:
            with Hosts(cpus) as hosts, contextlib.closing(SIDES[side](hosts)) as run:
                while names and (found := row(side, name := names.pop(0), run)):
                    figures.setdefault(name, []).append(found)
    return figures


def row(side, name, run):
    """Print the row of a fault. Return its figures, or None if the run did not survive it."""
    started = time.time()
    run.train()
    time.sleep(2)
    began, logged = time.time(), run.log.stat().st_size
    try:
        FAULTS[name][1](run)
        over = time.time()
        for host in (1, 2, 3):
            if not run.hosts.processes(host, "raylet"):  # Ray has declared the node dead
                run.hosts.start_ray(host)
        wait_until(lambda: any(num == NUM_WORKERS for _, num, _ in run.steps(over)), RECOVER_S)
        events = run.end()
    except AssertionError as error:
        print(f"| {side} | {name} | not survived: {str(error)[-300:]!r} |", flush=True)
        print(run.log.read_text(errors="replace")[logged:], flush=True)
        return None
    said = run.said(events)
    found = {"standstill_s": run.pause(began), "redone": run.redone(started)}
    print(f"| {side} | {name} | {found['standstill_s']:.1f} s | {found['redone']} |", flush=True)
    for line in [*said, *run.log.read_text(errors="replace")[logged:].splitlines()]:
        print(f"    {line}", flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], help="rows that have one of these words")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--runs", type=int, default=1, help="how often each is done")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--ray-train", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if (reason := why_not()) is not None:
        raise SystemExit(f"Hosts that vanish are not measured: {reason}.")
    if given.ray_train:
        ray_train(given.ray_train)
        return
    faults = [name for name in FAULTS if any(word in name for word in given.only)]
    figures = {side: measure(side, faults * given.runs) for side in given.sides}
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
