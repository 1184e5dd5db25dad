"""Trainers of every kind leave nothing in the driver's process, however they end."""

import collections
import contextlib
import gc
import os
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from raysgd import ElasticConfig, TFTrainer, TorchTrainer, train
from raysgd.callbacks import CheckpointCallback, JsonlLogger
from raysgd.train import Trainer
from tests.conftest import needs_full_sharding, needs_tensorflow, wait_until
from tests.faulty import interrupted_when
from tests.operators import Classifier

ENDS = ("shutdown", "error", "interrupt", "garbage")


def act(end, mark):
    """Do in the middle of a training what leads to this end."""
    if end == "error":
        raise KeyError("a mistake of the user")
    if end == "interrupt":
        Path(mark).touch()
        time.sleep(0.5)


class Acting:
    def train_batch(self, batch, batch_info):
        if self.global_step == 3:
            act(self.config["end"], self.config["mark"])
        return super().train_batch(batch, batch_info)


class Small(Acting, Classifier):
    pass


class Large(Small):
    """Its snapshots are so large that they have connections of their own."""

    def state_dict(self):
        return {"large": torch.zeros(2**23)}

    def load_state_dict(self, state):
        pass


class Sharded(Small):
    def register(self, **given):
        return super().register(**given, sharding="full", sharding_args={"copies": 1})


def of_operators(operator_cls=Small, trainer_cls=TorchTrainer, **settings):
    def make(end, mark, tmp_path):
        # Forks of a driver that uses Ray can crash, because threads of Ray hold locks.
        loader_workers = 0 if settings.get("use_local") and settings.get("num_workers") else 1
        config = {"end": end, "mark": mark, "num_samples": 320, "loader_workers": loader_workers}
        folder = tempfile.mkdtemp(dir=tmp_path)
        trainer = trainer_cls(
            training_operator_cls=operator_cls,
            config=config,
            use_gpu=False,
            elastic=ElasticConfig(snapshot_every=1),
            callbacks=[CheckpointCallback(folder, every=2, blocking=False), JsonlLogger()],
            logdir=folder,
            **settings,
        )
        if settings.get("use_local"):
            return trainer, lambda: trainer.fit(1, verbose=False)
        return trainer, trainer.train  # at its end, a snapshot is on its way

    return make


def of_keras(end, mark, tmp_path):
    from tests.tf_operators import Digits

    class Acted(Acting, Digits):
        pass

    return of_operators(Acted, TFTrainer, use_local=True)(end, mark, tmp_path)


def of_functions(end, mark, tmp_path):
    def function():
        for epoch in range(3):
            train.report(epoch=epoch)
            train.save_checkpoint(epoch=epoch, large=torch.zeros(2**23))
            if epoch == 1:
                act(end, mark)

    trainer = Trainer("torch", logdir=tempfile.mkdtemp(dir=tmp_path))
    trainer.start()
    return trainer, lambda: trainer.run(function)


KINDS = {
    "local": (of_operators(use_local=True), ENDS),
    "workers": (of_operators(Large, num_workers=2), ("error", "interrupt", "garbage")),
    "sharded": (of_operators(Sharded, num_workers=2, use_local=True), ("error", "interrupt")),
    "keras": (of_keras, ("error", "garbage")),
    "functions": (of_functions, ("garbage",)),
}
"""What makes trainers, and how these end. Each start of a worker costs seconds."""
MARKS = {"sharded": needs_full_sharding, "keras": needs_tensorflow}


def held():
    """Count what this process holds, by what it is."""
    process = psutil.Process()
    ports = [c for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
    children = [c for c in process.children() if c.status() != psutil.STATUS_ZOMBIE]
    return collections.Counter(
        {"descriptors": process.num_fds(), "ports": len(ports), "children": len(children)}
        | collections.Counter(f"thread {thread.name}" for thread in threading.enumerate())
        | collections.Counter(f"file {name}" for name in os.listdir(tempfile.gettempdir()))
    )


def run(make, end, tmp_path):
    """Train until this end. Return a trainer that was shut down, because a program may keep it."""
    mark = str(tmp_path / f"mark-{time.monotonic()}")
    trainer, call = make(end, mark, tmp_path)
    ending = contextlib.nullcontext()
    if end == "error":
        ending = pytest.raises(Exception, match="a mistake of the user")
    elif end == "interrupt":
        ending = pytest.raises(KeyboardInterrupt)
    with ending, interrupted_when(lambda: os.path.exists(mark)):
        call()
    if end != "garbage":
        trainer.shutdown()
        return trainer


@pytest.mark.slow("workers start two or three times for each kind")
@pytest.mark.parametrize("kind", [pytest.param(k, marks=MARKS.get(k, ())) for k in KINDS])
def test_trainers_leave_nothing(ray_cluster, tmp_path, monkeypatch, kind):
    (folder := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    make, ends = KINDS[kind]
    run(make, "shutdown", tmp_path)  # libraries keep some things from their first use
    gc.collect()
    before = held()
    kept = [run(make, end, tmp_path) for end in ends]
    gc.collect()
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not held() - before)
    assert held() - before == collections.Counter()
    del kept
