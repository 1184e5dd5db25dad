"""The files in examples/clusters are valid, and the Slurm script runs on two Ray nodes."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from ray._private import ray_constants

from tests.conftest import wait_until

ROOT = Path(__file__).parents[2]
CLUSTERS = ROOT / "examples" / "clusters"

# ---- Slurm

SLURM = {
    # start a step: skip the options, and record the process that scancel signals
    "srun": 'while [[ $1 == --* ]]; do shift; done; echo $$ >> steps; exec "$@"',
    "scancel": "xargs kill -TERM < steps",
    "scontrol": 'echo "$@" > requeued',
}
DRAINS_ON_SIGTERM = hasattr(ray_constants, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S")


def free_port():
    with socket.socket() as listening:
        listening.bind(("", 0))
        return listening.getsockname()[1]


@pytest.fixture
def slurm_job(tmp_path):
    """The process of slurm.sh in a job of two nodes, both on this machine."""
    (tmp_path / "bin").mkdir()
    for name, code in SLURM.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{code}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "1"}
    ray = {"RAY_PORT": str(free_port()), "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "4"}
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(
            ["bash", CLUSTERS / "slurm.sh", "fit.num_epochs=100000"],
            cwd=tmp_path,
            env=os.environ | slurm | ray | {"PATH": path},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    yield job
    tree = [job.pid, *map(int, (tmp_path / "steps").read_text().split())]
    for pid in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for each in [*process.children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
    job.wait()


@pytest.mark.slow("starts two Ray nodes")
@pytest.mark.skipif(not DRAINS_ON_SIGTERM, reason="this Ray ends its node at SIGTERM")
def test_the_slurm_script_saves_and_requeues_before_its_time_limit(slurm_job, tmp_path):
    run = tmp_path / "runs" / "digits"
    wait_until((run / "checkpoints").exists, timeout_s=60)
    slurm_job.send_signal(signal.SIGUSR1)
    wait_until((tmp_path / "requeued").exists, timeout_s=60)
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    drained = [event for event in events if event["kind"] == "draining"]
    assert {event["cause"] for event in drained} == {"Ray drains its node"}
    assert sorted(rank for event in drained for rank in event["ranks"]) == [0, 1]
