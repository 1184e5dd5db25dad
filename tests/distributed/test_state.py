"""Saving, loading, and exporting the state of a trainer, whose ports a stranger attacks."""

import contextlib
import datetime
import os
import random
import resource
import signal
import socket
import threading

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from raysgd import TorchTrainer
from raysgd.checkpoint import read_file, read_manifest
from raysgd.errors import CheckpointError
from raysgd.loop import operator_runner
from raysgd.torch.state_access import TorchStateAccess
from tests.ends import by_thread, check_that_shutdown_ends, hold
from tests.faulty import pids_of
from tests.operators import Classifier, make_data, replica_hash
from tests.shared import Shared

WIDE = 1_000
LARGE = torch.ones(5_000_000)
"""Makes states so large that they pass through connections."""


class Everything(Classifier):
    """Uses dropout, a scheduler, a scaler, accumulation, its own state, and random numbers."""

    def setup(self, config):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, WIDE),
            torch.nn.BatchNorm1d(WIDE),
            torch.nn.Dropout(),
            torch.nn.Linear(WIDE, 2),
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        self.drawn = []
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model,
            optimizers=optimizer,
            criterion=torch.nn.CrossEntropyLoss(),
            schedulers=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99),
            gradient_accumulation_steps=2,
        )
        loader = DataLoader(make_data(180), batch_size=10, shuffle=True)
        self.register_data(train_loader=loader, validation_loader=loader)

    def train_batch(self, batch, batch_info):
        self.drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        return super().train_batch(batch, batch_info)

    def state_dict(self):
        return {"drawn": self.drawn, "large": LARGE}

    def load_state_dict(self, state):
        assert torch.equal(state["large"], LARGE)
        self.drawn = list(state["drawn"])


SETTINGS = {
    "training_operator_cls": Everything,
    "num_workers": 2,
    "scheduler_step_freq": "batch",
    "use_fp16": True,
    "amp_dtype": torch.float16,
}


class Stranger(threading.Thread):
    """Attacks each port on which this process and its workers listen, as any host could.

    It opens silent connections, and sends garbage and the start of a message of raysgd.
    """

    said = (b"", b"\xff" * 200, b"GET / HTTP/1.1\r\n\r\n", b"sgd2" + bytes(200), b"[" * 2**20)

    def __init__(self):
        super().__init__(daemon=True)
        self.attacked, self.connections = {}, contextlib.ExitStack()
        self.over, self.draw = threading.Event(), random.Random(1)  # not that of operators
        self.spared = {*self.ports()}

    def __enter__(self):
        self.start()
        return self.attacked

    def __exit__(self, *error):
        self.over.set()
        self.join()
        self.connections.close()

    def ports(self):
        """Return the process IDs by port."""
        found = {}
        driver = psutil.Process()
        for process in (driver, *driver.children(recursive=True)):
            with contextlib.suppress(psutil.Error, IndexError):  # it has ended
                command = " ".join(process.cmdline())  # a fork keeps it with Ray 2.44
                if process == driver or command.startswith("ray::") or "forked_worker" in command:
                    open_ports = process.net_connections("tcp")
                    found |= {c.laddr.port: process.pid for c in open_ports if c.status == "LISTEN"}
        return found

    def run(self):
        while not self.over.wait(0.1):
            for port, pid in self.ports().items():
                if port not in self.spared and port not in self.attacked:
                    self.attacked[port] = pid
                    for _ in range(25):  # many more exceed the usual limit of open files
                        with contextlib.suppress(OSError):
                            connection = socket.create_connection(("127.0.0.1", port), 1)
                            self.connections.enter_context(connection)
                            connection.setblocking(False)
                            connection.send(self.draw.choice(self.said))


@pytest.fixture(scope="module")
def two_workers(module_cluster):
    """Two workers that start and train while a stranger attacks their ports."""
    with Stranger() as attacked, TorchTrainer(**SETTINGS, timeout_s=120) as trainer:
        pids = pids_of(trainer)
        yield Shared(trainer)
    assert os.getpid() in attacked.values()
    assert sum(pid in pids for pid in attacked.values()) > len(pids)  # Ray owns one port per worker


@pytest.fixture
def two(two_workers):
    return two_workers.fresh().trainer


def everything_of(operator):
    scaler = TorchStateAccess(operator._train_state).read()["amp_native"]
    # after a load, each rank has the draws of rank 0 from before the save
    drawn = operator.drawn[0 if operator.world_rank == 0 else 6 :]
    return replica_hash(operator), drawn, operator.scheduler.state_dict(), scaler


@pytest.mark.slow("two groups of workers, the second of which loads what the first saved")
def test_resumed_run_equals_an_uninterrupted_one(two, tmp_path):
    two.train(num_steps=6)
    path = two.save(tmp_path / "state.pt")
    two.train()
    expected = two.apply_all_operators(everything_of)
    two.load(path)
    assert two.global_step == 6
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in workers: the number changes the last bits
    with TorchTrainer(**SETTINGS, use_local=True, use_gpu=False) as other:
        other.load(path)
        for trainer in (two, other):
            assert trainer.train()["num_samples"] == 180 - 6 * 20
            assert trainer.apply_all_operators(everything_of) == expected
    torch.set_num_threads(num_threads)


def die_while_saving(operator):
    def write_a_part(state, shown, file):
        file.write(bytes(1 << 24))
        os.kill(os.getpid(), signal.SIGKILL)

    if operator.world_rank == 0:
        operator_runner.write_state = write_a_part


def test_another_worker_writes_the_file_if_the_first_is_lost(two, tmp_path):
    two.train(num_steps=2)
    two.apply_all_operators(die_while_saving)
    before = two.events[-1]
    path = two.save(tmp_path / "state.pt")
    assert two.events[two.events.index(before) + 1].kind == "lost"
    assert os.listdir(tmp_path) == ["state.pt"]
    assert read_manifest(path).global_step == read_file(path)["global_step"] == 2


def test_the_manifest_counts_the_workers_that_saved(two, tmp_path):
    os.kill(pids_of(two)[1], signal.SIGKILL)
    path = two.save(tmp_path / "state.pt")
    assert read_manifest(path).world_size == len(read_file(path)["data"]["rng"])


def test_a_failed_save_names_its_cause_and_leaves_no_file(two, tmp_path):
    before = pids_of(two)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"save to .*state\.pt: File too large"):
            two.save(tmp_path / "state.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == []
    two.apply_all_operators(lambda operator: operator.drawn.append(datetime.date(2020, 1, 1)))
    with pytest.raises(CheckpointError, match=r"state_dict\(\)\['drawn'\]\[0\] has the type"):
        two.save(tmp_path / "state.pt")
    assert os.listdir(tmp_path) == []
    with torch.serialization.safe_globals([datetime.date]):  # only in the driver's process
        assert read_file(two.save(tmp_path / "state.pt"))["operator"]["drawn"]
    assert two.train(num_steps=1)["batch_count"] == 1
    assert pids_of(two) == before


@pytest.mark.ends_shared
def test_a_save_is_ended_by_a_shutdown(two, tmp_path):
    two.apply_all_operators(hold("state_dict", tmp_path / "held"))
    check_that_shutdown_ends(
        lambda: two.save(tmp_path / "state.pt"), two, by_thread, (tmp_path / "held").exists, 2
    )
    assert not (tmp_path / "state.pt").exists()
