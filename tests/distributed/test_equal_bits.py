"""``exact="bits"``: kills, joins, and resumes on another number of workers do not change a bit."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from raysgd import EqualBits, TorchTrainer
from raysgd.testing import chaos
from raysgd.utils import BATCH_SIZE
from tests.conftest import wait_until
from tests.unit.torch.bits import CASES, NUM_SHARDS, Trains, digest

NUM_STEPS = 12
CASE = {**CASES["perceptron"], "num_samples": 24 * NUM_STEPS}


class Slow(Trains):
    def train_batch(self, batch, batch_info):
        time.sleep(0.01)  # so that a worker is killed within an epoch
        metrics = super().train_batch(batch, batch_info)
        self.step_schedulers()
        fault, has_updated = self.config["fault"], self._train_state.transaction.is_last
        is_due = has_updated and self.world_rank == 1 and self.global_step == NUM_STEPS + 6
        if fault is not None and is_due:
            with contextlib.suppress(FileExistsError):  # a replacement lives
                Path(fault).touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return metrics


def make_trainer(num_workers, use_local=False, fault=None):
    return TorchTrainer(
        training_operator_cls=Slow,
        config={"case": CASE, BATCH_SIZE: 24, "fault": fault},
        num_workers=num_workers,
        num_cpus_per_worker=1,
        use_gpu=False,
        exact=EqualBits(NUM_SHARDS),
        scheduler_step_freq="manual",
        use_fp16=True,
        amp_dtype=torch.float16,
        use_local=use_local,
    )


def result_of(trainer, *trained):
    """Return the metrics of calls of `train`, and a hash of the rest."""
    state, metrics = trainer.state_dict(), trainer.validate()
    kept = {name: metrics[name] for name in ("val_loss", "val_accuracy", "num_samples")}
    names = ("models", "optimizers", "schedulers", "amp_native")
    return trained, digest([*(state[name] for name in names), kept])


@pytest.fixture(scope="module")
def undisturbed(module_cluster):
    with make_trainer(1, use_local=True) as trainer:
        return result_of(trainer, trainer.train(), trainer.train())


def test_kills_and_joins_do_not_change_a_bit(undisturbed):
    with make_trainer(3) as trainer:
        faults = [chaos.Fault(rank=1, step=4), chaos.Fault(rank=0, step=NUM_STEPS + 6)]
        with chaos.Chaos(trainer, faults) as injected:
            assert result_of(trainer, trainer.train(), trainer.train()) == undisturbed
            wait_until(lambda: not injected.pending)  # a busy driver may kill late


def test_a_step_counts_only_with_the_metrics_of_a_lost_worker(undisturbed, tmp_path):
    with make_trainer(2, fault=tmp_path / "killed") as trainer:
        survivor = trainer.apply_all_workers(os.getpid)[0]
        assert result_of(trainer, trainer.train(), trainer.train()) == undisturbed
        assert "lost" in [event.kind for event in trainer.events]
        assert trainer.apply_all_workers(os.getpid)[0] == survivor, "it can discard its update"


def test_a_resume_on_another_number_of_workers_does_not_change_a_bit(undisturbed, tmp_path):
    with make_trainer(3) as trainer:
        trainer.train(num_steps=7)
        trainer.save(tmp_path / "model.pt")
    with make_trainer(2) as trainer:
        trainer.load(tmp_path / "model.pt")
        trainer.train()
        trained = undisturbed[0][0], trainer.train()
        assert result_of(trainer, *trained) == undisturbed
