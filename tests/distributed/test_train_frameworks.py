"""The training functions of the examples with TensorFlow and with Horovod: identical replicas.

Only a soak tests losses, because all processes restart.
"""

import os
import runpy
import signal
from functools import partial
from pathlib import Path

import pytest

from raysgd import ElasticConfig, train
from raysgd.train import Trainer
from tests.conftest import IN_SOAK, import_horovod
from tests.distributed.test_train_fit import Seen

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIG = {"lr": 3e-3, "num_epochs": 3}


def watched(function, folder, config):
    """Run a function. Return its last checkpoint on this worker, and the first epoch.

    In a soak, kill worker 1 in epoch 1, once.
    """
    saved, save, mark = [], train.save_checkpoint, Path(folder) / "died"

    def save_and_keep(**values):
        if IN_SOAK and (values["epoch"], train.world_rank()) == (1, 1) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        saved.append(values)
        save(**values)

    train.save_checkpoint = save_and_keep
    try:
        function(config)
    finally:
        train.save_checkpoint = save
    weights = saved[-1]["weights"] if "weights" in saved[-1] else saved[-1]["model"].values()
    return [weight.tolist() for weight in weights], saved[0]["epoch"]


def raise_alone(config):
    """Raise on worker 0 while worker 1 waits for it in a collective."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    hvd.allreduce(torch.ones(1), name="together")
    if hvd.rank() == 0:
        raise KeyError("on purpose")
    hvd.allreduce(torch.ones(1), name="alone")


@pytest.mark.slow("two workers start, and may import TensorFlow")
@pytest.mark.parametrize("name", ["tensorflow", "horovod"])
def test_workers_train_in_step(name, ray_cluster, tmp_path):
    pytest.importorskip("tensorflow") if name == "tensorflow" else import_horovod()
    function = runpy.run_path(str(EXAMPLES / f"functions_{name}.py"))["train_func"]
    elastic, seen = ElasticConfig(backoff_initial_s=0.2, resize_cooldown_s=0.0), Seen()
    trainer = Trainer(name, num_workers=2, logdir=tmp_path / "runs", elastic=elastic)
    trainer.start()
    try:
        in_step = partial(watched, function, str(tmp_path))
        (weights, begun_at), other = trainer.run(in_step, CONFIG, callbacks=[seen])
        assert other == (weights, begun_at)
        assert begun_at == (1 if IN_SOAK else 0)
        first, second = (result["accuracy"] for result in seen.results[-1])
        assert first == second > 0.8
        kinds = [event.kind for event in trainer.events]
        assert kinds == ["started", "lost", "restarted"][: 3 if IN_SOAK else 1]
        if name == "horovod":
            with pytest.raises(KeyError, match="on purpose"):
                trainer.run(raise_alone, {})  # the workers are initialized already
    finally:
        trainer.shutdown()
