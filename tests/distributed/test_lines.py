"""Calls by the driver's own connections: what breaks them costs no step, and they leave nothing."""

import logging
import socket
import threading
import time

import pytest

from raysgd import TorchTrainer
from raysgd.execution.lines import Lines
from raysgd.execution.members import ActorMember
from tests.conftest import wait_until
from tests.distributed.test_exactness import Ledger, ledger_of

NUM_SAMPLES = 400


def make_trainer(num_workers=2):
    return TorchTrainer(
        training_operator_cls=Slow,
        config={"num_samples": NUM_SAMPLES, "batch_size": 5, "loader_workers": 0},
        num_workers=num_workers,
    )


class Slow(Ledger):
    """Takes its time for a step, in which something may happen."""

    def train_batch(self, batch, batch_info):
        time.sleep(0.005)
        return super().train_batch(batch, batch_info)


def lines_of(trainer):
    return trainer._supervisor._group._lines


def test_connections_that_break_cost_no_step(ray_cluster):
    """Those of both workers, in the midst of a call, again and again."""
    with make_trainer() as trainer:
        done = threading.Event()
        broken = []

        def break_all():
            while not done.wait(0.05):
                broken.append(lines_of(trainer)._reader is not None)
                lines_of(trainer).close()

        breaker = threading.Thread(target=break_all)
        breaker.start()
        try:
            for _ in range(10):
                trainer.train(num_steps=2)
            metrics = trainer.train()
        finally:
            done.set()
            breaker.join()
        assert sum(broken) > 2
        assert lines_of(trainer).usable
        assert metrics["num_samples"] == NUM_SAMPLES - 10 * 2 * 10
        assert ledger_of(trainer).eq(1).all()
        assert trainer.global_step == NUM_SAMPLES // 10
        assert [event.kind for event in trainer.events] == ["started"]


def test_workers_that_cannot_connect_are_called_by_ray(ray_cluster, monkeypatch, caplog):
    opened = Lines.open

    def elsewhere(self, host):
        line = opened(self, host)
        with socket.create_server((host, 0)) as listener:
            port = listener.getsockname()[1]
        line.address = line.address._replace(port=port)  # where nobody listens any more
        return line

    monkeypatch.setattr(Lines, "open", elsewhere)
    caplog.set_level(logging.WARNING, "raysgd")
    with make_trainer() as trainer:
        trainer.train(num_steps=3)
        assert trainer.train()["num_samples"] == NUM_SAMPLES - 3 * 10
        assert ledger_of(trainer).eq(1).all()
        assert not lines_of(trainer).usable
    said = [r.message for r in caplog.records if "cannot connect to the driver" in r.message]
    assert len(said) == 1


def test_calls_by_both_ways_keep_their_order(ray_cluster):
    with make_trainer() as trainer:
        for number in range(1, 6):
            trainer.train(num_steps=1)
            assert (
                trainer.apply_all_operators(lambda operator: operator.global_step) == [number] * 2
            )
            assert trainer.state_dict()["global_step"] == number
            trainer.train(num_steps=1, info={"large": bytes(2**15)})
            trainer.load_state_dict(trainer.state_dict() | {"global_step": number})
        assert trainer.global_step == 5


def test_nothing_of_them_is_left(ray_cluster):
    with make_trainer() as trainer:
        trainer.train(num_steps=1)
        assert any(thread.name == "raysgd-lines" for thread in threading.enumerate())
    wait_until(lambda: not any(t.name == "raysgd-lines" for t in threading.enumerate()))


@pytest.mark.parametrize("num_workers", [1, 3])
def test_most_calls_are_none_of_rays(ray_cluster, monkeypatch, num_workers):
    work_by_ray = []
    submit = ActorMember._submit

    def noted(self, group, method, arguments):
        if group == "work":
            work_by_ray.append(method)
        return submit(self, group, method, arguments)

    monkeypatch.setattr(ActorMember, "_submit", noted)
    with make_trainer(num_workers) as trainer:
        work_by_ray.clear()
        for _ in range(5):
            trainer.train(num_steps=1)
        assert work_by_ray == ["serve"] * num_workers
