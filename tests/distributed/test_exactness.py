"""Results equal those of one plain PyTorch process, whatever the number of workers."""

import contextlib
import os
import random
import socket
import threading

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from raysgd import TorchTrainer
from tests.operators import NUM_SAMPLES, Classifier, make_data, make_model, parameters
from tests.shared import Shared


@torch.no_grad()
def plain_validation(model):
    """Validate as a hand-written loop in one process does."""
    features, target = make_data().tensors
    output = model.eval()(features)
    return {
        "num_samples": NUM_SAMPLES,
        "val_loss": torch.nn.functional.cross_entropy(output, target).item(),
        "val_accuracy": (output.argmax(dim=1) == target).double().mean().item(),
    }


def plain_training(num_steps, batch_size):
    """Train as a hand-written loop in one process does; return the model."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = torch.nn.CrossEntropyLoss()
    batches = iter(DataLoader(make_data(), batch_size=batch_size))
    for _ in range(num_steps):
        features, target = next(batches)
        optimizer.zero_grad()
        criterion(model(features), target).backward()
        optimizer.step()
    return model


class Stranger(threading.Thread):
    """Attacks each port on which this process and its workers listen, as any host could.

    It opens silent connections, and sends garbage and the start of a message of raysgd.
    """

    said = (b"", b"\xff" * 200, b"GET / HTTP/1.1\r\n\r\n", b"sgd2" + bytes(200), b"[" * 2**20)

    def __init__(self):
        super().__init__(daemon=True)
        self.attacked, self.connections = {}, contextlib.ExitStack()
        self.over = threading.Event()
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
                if process == driver or process.cmdline()[0].startswith("ray::"):
                    open_ports = process.net_connections("tcp")
                    found |= {c.laddr.port: process.pid for c in open_ports if c.status == "LISTEN"}
        return found

    def run(self):
        while not self.over.wait(0.1):
            for port, pid in self.ports().items():
                if port not in self.spared and port not in self.attacked:
                    self.attacked[port] = pid
                    for _ in range(100):
                        with contextlib.suppress(OSError):
                            connection = socket.create_connection(("127.0.0.1", port), 1)
                            self.connections.enter_context(connection)
                            connection.setblocking(False)
                            connection.send(random.choice(self.said))


@pytest.fixture(scope="module")
def three_workers(module_cluster):
    """Three workers that start and train while a stranger attacks their ports."""
    config = {"batch_size": 16, "shuffle": False, "momentum": 0.9, "loader_workers": 1}
    with (
        Stranger() as attacked,
        TorchTrainer(
            training_operator_cls=Classifier, config=config, num_workers=3, timeout_s=120
        ) as trainer,
    ):
        pids = trainer.apply_all_workers(os.getpid)
        yield Shared(trainer)
    assert os.getpid() in attacked.values()
    assert sum(pid in pids for pid in attacked.values()) > len(pids)  # Ray owns one port per worker


@pytest.fixture
def three(three_workers):
    return three_workers.fresh().trainer


def check_validation(trainer):
    """Check that metrics equal those of one process, and that validation changes no weights."""
    before = trainer.get_model().state_dict()
    metrics = trainer.validate()
    expected = plain_validation(trainer.get_model())
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, abs=1e-6)
    after = trainer.get_model().state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_validation_equals_a_single_process(three):
    check_validation(three)
    three.train()
    check_validation(three)


def test_three_workers_equal_one_process_with_three_times_the_batch(three):
    three.train(num_steps=1)
    three.train(num_steps=9)
    found = three.apply_all_operators(parameters)
    expected = torch.cat([p.reshape(-1) for p in plain_training(10, 48).parameters()]).detach()
    assert all(torch.equal(found[0], each) for each in found)
    assert torch.allclose(found[0], expected, atol=1e-6, rtol=0)
