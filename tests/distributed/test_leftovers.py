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

ERROR, INTERRUPT, ALL = ("error",), ("interrupt",), ("error", "interrupt")


class Acting:
    """Fails in the fourth step as its config says, one fault after the other."""

    def train_batch(self, batch, batch_info):
        if self.global_step == 3 and self.config["faults"]:
            if self.config["faults"].pop(0) == "error":
                raise KeyError("a mistake of the user")
            Path(self.config["mark"]).touch()
            time.sleep(0.5)
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
        return super().register(**given, sharding="full", sharding_args={"num_copies": 1})


def of_operators(operator_cls=Small, trainer_cls=TorchTrainer, **settings):
    def make(faults, mark, tmp_path):
        # Forks of a driver that uses Ray can crash, because threads of Ray hold locks.
        num_loader_workers = 0 if settings.get("use_local") and settings.get("num_workers") else 1
        config = {"faults": [*faults], "mark": mark}
        config |= {"num_samples": 320, "num_loader_workers": num_loader_workers}
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


def of_keras(faults, mark, tmp_path):
    from tests.tf_operators import Digits

    class Acted(Acting, Digits):
        pass

    return of_operators(Acted, TFTrainer, use_local=True)(faults, mark, tmp_path)


def of_functions(faults, mark, tmp_path):
    def function():
        for epoch in range(3):
            train.report(epoch=epoch)
            train.save_checkpoint(epoch=epoch, large=torch.zeros(2**23))

    trainer = Trainer("torch", logdir=tempfile.mkdtemp(dir=tmp_path))
    trainer.start()
    return trainer, lambda: trainer.run(function)


KINDS = {
    "local": (of_operators(use_local=True), [(), ERROR, INTERRUPT, ALL]),
    "workers": (of_operators(Large, num_workers=2), [ALL, ()]),
    "sharded": (of_operators(Sharded, num_workers=2, use_local=True), [ERROR, INTERRUPT]),
    "keras": (of_keras, [ERROR, ()]),
    "functions": (of_functions, [()]),
}
"""What makes trainers, and the faults of each. Each start of a worker costs seconds."""
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


def run(make, faults, tmp_path, is_garbage):
    """Train with faults. Return a trainer that was shut down, because a program may keep it."""
    mark = str(tmp_path / f"mark-{time.monotonic()}")
    trainer, call = make(faults, mark, tmp_path)
    for fault in faults:
        ending = pytest.raises(KeyError if fault == "error" else KeyboardInterrupt)
        with ending, interrupted_when(lambda: os.path.exists(mark)):
            call()
    if not faults:
        call()
    if not is_garbage:
        trainer.shutdown()
        return trainer


@pytest.mark.slow("workers start two or three times for each kind")
@pytest.mark.parametrize("kind", [pytest.param(k, marks=MARKS.get(k, ())) for k in KINDS])
def test_trainers_leave_nothing(ray_cluster, tmp_path, tmp_path_factory, monkeypatch, kind):
    folder = str(tmp_path_factory.mktemp("t"))  # PyTorch's sockets need a short path
    monkeypatch.setattr(tempfile, "tempdir", folder)
    make, runs = KINDS[kind]
    run(make, (), tmp_path, is_garbage=False)  # libraries keep some things from their first use
    gc.collect()
    before = held()
    before["descriptors"] += 2  # Ray connects to its processes when it likes; a trainer leaked 4
    kept = [run(make, faults, tmp_path, is_garbage=not faults) for faults in runs]
    gc.collect()
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not held() - before)
    assert held() - before == collections.Counter()
    del kept
