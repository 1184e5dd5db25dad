"""The files in examples/clusters are valid. The Slurm script runs on two Ray nodes, with fakes of
three Slurm commands. A fake metadata service announces the end of a spot machine.
"""

import contextlib
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import jsonschema
import psutil
import pytest
import ray.autoscaler
import yaml
from ray._private import ray_constants
from ray.scripts.scripts import cli as ray_cli
from typer.main import get_command

from raysgd import TorchTrainer
from raysgd.callbacks import CheckpointCallback
from raysgd.cli import app
from raysgd.cli.fit import load_operator, read_settings
from tests.conftest import IN_SOAK, wait_until

ROOT = Path(__file__).parents[2]
CLUSTERS = ROOT / "examples" / "clusters"
PAGES = [ROOT / "docs" / f"{name}.md" for name in ("kubernetes", "slurm", "spot")]

# ---- commands


def test_the_files_name_extras_that_exist():
    text = "".join(path.read_text(encoding="utf-8") for path in CLUSTERS.iterdir())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = ",".join(re.findall(r"raysgd\[([\w,]+)\]", text)).split(",")
    assert named != [""]
    assert set(named) <= set(project["optional-dependencies"])


def commands(path):
    """Return the `ray` and `raysgd` commands of a page or file, as lists of words."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        text = "\n".join(re.findall(r"```(?:shell|text)\n(.*?)```", text, re.DOTALL))
        text = re.sub(r"(\\)?\n\s+(?=--)", " ", text)  # join lines of one command
    if path.suffix == ".sh":
        text = re.sub(r"(^|\s)#.*", "", text)
    if path.suffix == ".yaml":  # one string per line
        text = json.dumps(list(yaml.safe_load_all(text)))
        text = "\n".join(re.findall(r'"((?:[^"\\]|\\.)*)"', text))
    text = text.replace("\\\n", " ").replace('"${@:2}"', "--block")
    found = re.findall(r"(?:^|(?<=[\s\"']))ray(?:sgd)? [a-z][^#\n;|&>]*", text, re.MULTILINE)
    return [command.replace('"', "").replace("'", "").split() for command in found]


WITH_COMMANDS = [
    *PAGES,
    *(CLUSTERS / name for name in ("aws.yaml", "rayjob.yaml", "slurm.sh", "slurm_worker.sh")),
]


@pytest.mark.parametrize("path", WITH_COMMANDS, ids=lambda path: path.name)
def test_the_commands_exist_with_their_options(path):
    assert commands(path)
    for program, *rest in commands(path):
        command = ray_cli if program == "ray" else get_command(app)
        while hasattr(command, "commands"):
            name = rest.pop(0)
            if name == "symmetric-run":  # it takes the options of ray start
                name, rest = "start", [word for word in rest if word != "--min-nodes"]
            if name == "get-auth-token" and name not in command.commands:  # Ray before 2.52
                rest = []
                break
            command = command.commands[name]
        own = rest[: rest.index("--")] if "--" in rest else rest
        options = {option for parameter in command.params for option in parameter.opts}
        used = {word.partition("=")[0] for word in own if word.startswith("--")}
        assert used <= options, (program, name)


@pytest.mark.parametrize("path", [PAGES[2], CLUSTERS / "rayjob.yaml", CLUSTERS / "slurm.sh"])
def test_the_arguments_of_raysgd_fit_exist(path, monkeypatch):
    (words,) = (words for words in commands(path) if words[:2] == ["raysgd", "fit"])
    operator, *overrides = (word for word in words[2:] if re.match(r"\w+:\w+$|[a-z]+\.\w+=", word))
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    load_operator(operator)
    config = ROOT / "examples" / Path(words[words.index("--config") + 1]).name
    settings = read_settings(config, overrides)
    assert settings["trainer"].keys() <= inspect.signature(TorchTrainer).parameters.keys()
    assert settings["fit"].keys() <= inspect.signature(TorchTrainer.fit).parameters.keys()
    assert settings["checkpoint"].keys() <= inspect.signature(CheckpointCallback).parameters.keys()


# ---- Kubernetes and the autoscaler


def test_the_parts_of_the_ray_job_fit_together():
    job, claim = yaml.safe_load_all((CLUSTERS / "rayjob.yaml").read_text(encoding="utf-8"))
    cluster = job["spec"]["rayClusterSpec"]
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for pod in (group["template"]["spec"] for group in pods):
        volumes = {volume["name"]: volume["persistentVolumeClaim"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys()
        assert volumes["runs"] == {"claimName": claim["metadata"]["name"]}
    (workers,) = cluster["workerGroupSpecs"]
    pod = workers["template"]["spec"]
    env = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
    drain_s = float(env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
    assert drain_s < pod["terminationGracePeriodSeconds"]
    command = job["spec"]["entrypoint"]
    assert f"--num-workers {workers['maxReplicas']} " in command
    assert f"trainer.min_workers={workers['minReplicas']} " in command
    cpus = pod["containers"][0]["resources"]["limits"]["cpu"]
    assert f"trainer.num_cpus_per_worker={cpus} " in command


def test_the_autoscaler_accepts_the_aws_cluster():
    cluster = yaml.safe_load((CLUSTERS / "aws.yaml").read_text(encoding="utf-8"))
    schema = Path(ray.autoscaler.__file__).with_name("ray-schema.json")
    jsonschema.validate(cluster, json.loads(schema.read_text(encoding="utf-8")))
    assert cluster["head_node_type"] in cluster["available_node_types"]
    assert (ROOT / cluster["file_mounts"]["/app/drain_on_notice.py"]).is_file()


# ---- Slurm and spot notices


def test_bash_can_parse_the_slurm_scripts():
    for path in CLUSTERS.glob("*.sh"):
        subprocess.run(["bash", "-n", path], check=True)


SLURM = {
    # start a step: skip the options, and record the process that scancel signals
    "srun": 'while [[ $1 == --* ]]; do shift; done; echo $$ >> "$STEPS"; exec "$@"',
    "scancel": 'xargs kill -TERM < "$STEPS"',
    "scontrol": 'echo "$@" > requeued',
}


def free_port():
    with socket.socket() as listening:
        listening.bind(("", 0))
        return listening.getsockname()[1]


@contextlib.contextmanager
def slurm_cluster(folder):
    """Yield a function that starts a script as a job on this machine, in a folder with fakes."""
    (folder / "bin").mkdir()
    for name, code in SLURM.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{code}\n")
        (folder / "bin" / name).chmod(0o755)
    (folder / "examples").symlink_to(ROOT / "examples")
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    ray = {"RAY_PORT": str(free_port()), "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "4"}
    slurm = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1"}
    jobs = []

    def start(script, *arguments, num_nodes=1, name="steps"):
        own = {"SLURM_JOB_NUM_NODES": str(num_nodes), "STEPS": str(folder / name), "PATH": path}
        with (folder / "log").open("a") as log:
            job = subprocess.Popen(
                ["bash", CLUSTERS / script, *arguments],
                cwd=folder,
                env=os.environ | slurm | ray | own,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        jobs.append(job)
        return job

    yield start
    started = [pid for path in folder.glob("steps*") for pid in steps(path)]
    for pid in (*(job.pid for job in jobs), *started):
        with contextlib.suppress(psutil.NoSuchProcess):
            tree = [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]
            for process in tree:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
    for job in jobs:
        job.wait()


@pytest.fixture(scope="module")
def slurm_job(tmp_path_factory):
    """The process and the folder of slurm.sh in a job of two nodes, both on this machine."""
    folder = tmp_path_factory.mktemp("slurm")
    with slurm_cluster(folder) as start:
        options = ("fit.num_epochs=100000", "checkpoint.every=1000000")
        yield start("slurm.sh", *options, num_nodes=2), folder


def steps(path):
    """Return the IDs of the processes that srun has started."""
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def num_epochs(folder):
    path = folder / "runs" / "digits" / "metrics.jsonl"
    return path.read_text().count('"validate"') if path.exists() else 0


def events(folder):
    path = folder / "runs" / "digits" / "events.jsonl"
    return [*map(json.loads, path.read_text().splitlines())] if path.exists() else []


def draining(folder):
    return [event for event in events(folder) if event["kind"] == "draining"]


class PreemptionNotice(BaseHTTPRequestHandler):
    """A metadata service, which announces at the second request that the machine goes."""

    ANSWERS: ClassVar = {
        "/latest/api/token": "token",
        "/latest/meta-data/spot/instance-action": '{"action": "terminate"}',
        "/computeMetadata/v1/instance/preempted": "TRUE",
    }
    unannounced = 0
    """Number of requests that find no notice yet."""

    def do_GET(self):
        type(self).unannounced -= "action" in self.path
        is_there = "action" not in self.path or self.unannounced < 0
        self.send_response(200 if is_there else 404)
        self.end_headers()
        self.wfile.write(self.ANSWERS[self.path].encode() if is_there else b"")

    do_PUT = do_GET  # noqa: N815

    def log_message(self, *args):
        pass


@pytest.fixture
def metadata_url():
    server = HTTPServer(("127.0.0.1", 0), PreemptionNotice)
    PreemptionNotice.unannounced = 1
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.skipif(not IN_SOAK, reason="24 s for a script that rarely changes")
@pytest.mark.slow("starts two Ray nodes")
def test_a_spot_notice_drains_the_node(slurm_job, metadata_url):
    _, folder = slurm_job
    wait_until(lambda: num_epochs(folder) > 1, timeout_s=240)
    job_env = psutil.Process(steps(folder / "steps")[0]).environ()  # with the token
    subprocess.run(
        [sys.executable, CLUSTERS / "drain_on_notice.py", "aws"],
        env=job_env | {"METADATA_URL": metadata_url},
        timeout=60,
        check=True,
    )
    wait_until(lambda: draining(folder))
    (event,) = draining(folder)
    assert event["cause"] == "Ray drains its node"
    assert 90 < event["seconds"] <= 110


needs_drain = pytest.mark.skipif(
    not hasattr(ray_constants, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"),
    reason="this version of Ray does not drain a node on SIGTERM",
)


@pytest.mark.skipif(not IN_SOAK, reason="24 s for a script that rarely changes")
@pytest.mark.slow("waits until Ray has drained both nodes")
@needs_drain
def test_the_slurm_script_drains_and_requeues_before_its_time_limit(slurm_job):
    job, folder = slurm_job
    wait_until(lambda: num_epochs(folder) > 1, timeout_s=240)
    job.send_signal(signal.SIGUSR1)
    wait_until((folder / "requeued").exists, timeout_s=60)
    assert (folder / "requeued").read_text() == "requeue 7\n"
    assert {rank for event in draining(folder) for rank in event["ranks"]} == {0, 1}
    assert list((folder / "runs" / "digits" / "checkpoints").glob("*.ckpt"))


@pytest.mark.skipif(not IN_SOAK, reason="a minute for scripts that rarely change")
@pytest.mark.slow("starts three Ray nodes")
@needs_drain
def test_slurm_jobs_join_the_ray_of_a_head_job_and_leave_it(tmp_path):
    def wait_for(num_workers):
        wait_until(
            lambda: events(tmp_path) and events(tmp_path)[-1]["num_workers"] == num_workers,
            timeout_s=240,
        )

    with slurm_cluster(tmp_path) as start:
        first = start("slurm_worker.sh", name="steps-1")  # waits for the head
        options = ("--num-workers", "3", "trainer.min_workers=1", "fit.num_epochs=100000")
        head = start("slurm.sh", *options)
        wait_for(2)
        assert (tmp_path / "runs" / "digits" / "ray.env").stat().st_mode & 0o777 == 0o600
        second = start("slurm_worker.sh", name="steps-2")
        wait_for(3)
        for pid in steps(tmp_path / "steps-1"):  # as scancel and a preemption do
            os.kill(pid, signal.SIGTERM)
        wait_for(2)
        wait_until(lambda: first.poll() is not None, timeout_s=60)
        assert draining(tmp_path)
        before = num_epochs(tmp_path)
        wait_until(lambda: num_epochs(tmp_path) > before, timeout_s=60)
        assert (head.poll(), second.poll()) == (None, None)
