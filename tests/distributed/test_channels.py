"""Calls by the driver's own connections: what breaks them costs no step, and they leave nothing."""

import logging
import socket
import threading
import time

import pytest

from raysgd import TorchTrainer
from raysgd.cluster.channels import Channels
from raysgd.cluster.members import ActorMember
from tests.conftest import wait_until
from tests.ledger import Ledger, ledger_of
from tests.shared import Shared

NUM_SAMPLES = 400


class Slow(Ledger):
    """Takes its time for a step, in which something may happen."""

    def train_batch(self, batch, batch_info):
        time.sleep(0.005)
        return super().train_batch(batch, batch_info)


def make_trainer():
    return TorchTrainer(
        training_operator_cls=Slow,
        config={"num_samples": NUM_SAMPLES, "batch_size": 5},
        num_workers=2,
    )


def has_channels():
    return any(thread.name == "raysgd-channels" for thread in threading.enumerate())


@pytest.fixture(scope="module")
def two_workers(module_cluster):
    with make_trainer() as trainer:
        yield Shared(trainer)
        trainer.train(num_steps=1)
        assert has_channels()
    wait_until(lambda: not has_channels())


@pytest.fixture
def two(two_workers):
    return two_workers.fresh()


def lines_of(trainer):
    return trainer._controller._group._channels


def test_most_calls_are_none_of_rays_and_keep_their_order(two, monkeypatch):
    work_by_ray = []
    submit = ActorMember._submit

    def noted(self, group, method, arguments):
        if group == "work":
            work_by_ray.append(method)
        return submit(self, group, method, arguments)

    trainer = two.trainer
    trainer.train(num_steps=1)
    with monkeypatch.context() as patch:
        patch.setattr(ActorMember, "_submit", noted)
        for _ in range(5):
            trainer.train(num_steps=1)
    assert work_by_ray == ["serve"] * len(work_by_ray)
    assert len(work_by_ray) in (0, 2)  # once a worker, until something else comes between

    trainer.load_state_dict(two.start)
    for number in range(1, 6):
        trainer.train(num_steps=1)
        assert trainer.apply_all_operators(lambda operator: operator.global_step) == [number] * 2
        assert trainer.state_dict()["global_step"] == number
        trainer.train(num_steps=1, info={"large": bytes(2**15)})
        trainer.load_state_dict(trainer.state_dict() | {"global_step": number})
    assert trainer.global_step == 5


def test_connections_that_break_cost_no_step(two):
    """Those of both workers, in the midst of a call, again and again."""
    trainer = two.trainer
    done = threading.Event()
    broken = []

    def break_all():
        while not done.wait(0.05):
            broken.append(bool(lines_of(trainer)._listeners))
            lines_of(trainer).close()

    breaker = threading.Thread(target=break_all)
    breaker.start()
    try:
        while trainer.global_step < 20 or sum(broken) <= 2:
            trainer.train(num_steps=2)
            assert trainer.global_step < NUM_SAMPLES // 10, "over before three have broken"
        left = NUM_SAMPLES - trainer.global_step * 10
        metrics = trainer.train()
    finally:
        done.set()
        breaker.join()
    assert sum(broken) > 2
    assert lines_of(trainer).usable
    assert metrics["num_samples"] == left
    assert ledger_of(trainer).eq(1).all()
    assert trainer.global_step == NUM_SAMPLES // 10
    # pulses break with them: a worker for which that lasts two seconds may stop once, as cut off
    assert {*two.kinds} <= {"resumed"}


def test_workers_that_cannot_connect_are_called_by_ray(module_cluster, monkeypatch, caplog):
    opened = Channels.open

    def elsewhere(self, host):
        channel = opened(self, host)
        with socket.create_server((host, 0)) as listener:
            port = listener.getsockname()[1]
        channel.address = channel.address._replace(port=port)  # where nobody listens any more
        return channel

    monkeypatch.setattr(Channels, "open", elsewhere)
    caplog.set_level(logging.WARNING, "raysgd")
    with make_trainer() as trainer:
        trainer.train(num_steps=3)
        assert trainer.train()["num_samples"] == NUM_SAMPLES - 3 * 10
        assert ledger_of(trainer).eq(1).all()
        assert not lines_of(trainer).usable
    said = [r.message for r in caplog.records if "cannot connect to the driver" in r.message]
    assert len(said) == 1
