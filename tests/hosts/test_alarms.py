"""An hour of hard work, in which every host is there: none may be taken for lost."""

import contextlib
import ctypes
import itertools
import os
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch

from raysgd import ElasticConfig
from tests.conftest import IN_SOAK, nothing_left
from tests.ledger import Ledger, Weights, ledger_of, ledger_trainer

TRAIN_S = 60 * float(os.environ.get("RAYSGD_ALARM_MINUTES", "60"))
NUM_WORKERS = 3
NUM_STEPS = 200
HELD_S, STOPPED_S = 60, 30
BURDEN = 500_000_000
"""Numbers of four bytes that a checkpoint holds beside the ledger: 2 GB."""

pytestmark = [
    pytest.mark.skipif(not IN_SOAK, reason="it takes an hour"),
    pytest.mark.timeout(TRAIN_S + 1800),
]


class Burdened(Ledger):
    """Does between two steps what it is told in a file, with a large model that mostly rests."""

    def setup(self, config):
        model = Weights(config["num_samples"])
        model.burden = torch.nn.Parameter(torch.zeros(BURDEN), requires_grad=False)
        self.model, self.optimizer = self.register(
            models=model, optimizers=torch.optim.SGD([model.weights], lr=1.0)
        )
        self.register_data(train_loader=self.make_loader(config))

    def train_batch(self, batch, batch_info):
        time.sleep(0.02)
        told = os.path.join(self.config["folder"], f"told-{self.world_rank}")
        if os.path.exists(told):
            with open(told) as file:
                order = file.read()
            os.remove(told)
            if order == "hold":  # a library of Python's API: it keeps the interpreter's lock
                ctypes.PyDLL(None).sleep(HELD_S)
            else:
                import tensorflow  # noqa: F401
        return super().train_batch(batch, batch_info)


@contextlib.contextmanager
def busy(number):
    """So many processes that take all of the processors that others leave, and some more."""
    code = "import os\nos.nice(19)\nwhile True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_an_hour_of_hard_work_is_no_loss(cluster, tmp_path):
    """Workers hold Python's lock, stand still, load TensorFlow, and save 2 GB."""

    def tell(rank, order):
        new = tmp_path / "new"
        new.write_text(order)
        new.rename(tmp_path / f"told-{rank}")

    def stop(rank):
        process = psutil.Process(trainer._controller.members[rank].info.pid)
        process.suspend()
        threading.Timer(STOPPED_S, process.resume).start()

    with nothing_left(cluster), busy(4):
        elastic = ElasticConfig(snapshot_every=None, hang_timeout_s=None)
        with ledger_trainer(
            NUM_WORKERS,
            4 * NUM_WORKERS * NUM_STEPS,
            elastic,
            Burdened,
            folder=str(tmp_path),
        ) as trainer:
            end = time.monotonic() + TRAIN_S
            for number in itertools.count():
                turn, rank = number % 4, number // 4 % NUM_WORKERS
                if turn == 0:
                    tell(rank, "hold")
                elif turn == 1:
                    stop(rank)
                elif turn == 2:
                    tell(rank, "load")
                else:
                    trainer.save(tmp_path / "checkpoint", blocking=False)
                metrics = trainer.train()
                print(f"{time.ctime()}: {('held', 'stopped', 'loaded', 'saved')[turn]}", flush=True)
                assert metrics["num_samples"] == trainer.config["num_samples"]
                assert [event.kind for event in trainer.events] == ["started"], trainer.events
                if time.monotonic() > end:
                    break
            assert (ledger_of(trainer) == trainer.epoch).all()
