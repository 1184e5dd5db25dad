"""``exact="bits"``: kills, joins, and resumes on another number of workers do not change a bit."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from raysgd import EqualBits, TorchTrainer
from tests.conftest import wait_until
from tests.equal_bits import hash_of
from tests.unit.torch.bits import NUM_SHARDS, Case, Trains

NUM_STEPS = 12
CASE = Case(num_samples=24 * NUM_STEPS)


class Slow(Trains):
    def train_batch(self, batch, batch_info):
        time.sleep(0.01)  # so that a worker is killed within an epoch
        metrics = super().train_batch(batch, batch_info)
        self.step_schedulers()
        fault, has_updated = self.config["fault"], self._train_state.transaction.is_last
        is_due = has_updated and self.world_rank == 1 and self.global_step == 6
        if fault is not None and is_due:
            with contextlib.suppress(FileExistsError):  # a replacement lives
                Path(fault).touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return metrics


def make_trainer(num_workers, use_local=False, fault=None):
    return TorchTrainer(
        training_operator_cls=Slow,
        config={**CASE.config(), "fault": fault},
        num_workers=num_workers,
        num_cpus_per_worker=1,
        use_gpu=False,
        exact=EqualBits(NUM_SHARDS),
        scheduler_step_freq="manual",
        use_fp16=True,
        amp_dtype=torch.float16,
        use_local=use_local,
    )


@pytest.mark.slow("workers are lost and replaced, and others resume")
def test_losses_joins_and_a_resume_on_more_workers_do_not_change_a_bit(module_cluster, tmp_path):
    """A step counts only with the metrics of a lost worker. A survivor can discard its update."""

    def train(trainer, *num_steps):
        return [trainer.train(num_steps=number) for number in num_steps]

    with make_trainer(1, use_local=True) as trainer:
        trained = train(trainer, None, 7, None)
        expected = trained, hash_of(trainer)
    with make_trainer(2, fault=tmp_path / "killed") as trainer:
        survivor = trainer.apply_all_workers(os.getpid)[0]
        trained = train(trainer, None)
        wait_until(lambda: trainer.num_workers == 2 or not trainer.validate(), 60)
        trained += train(trainer, 7)
        assert [event.kind for event in trainer.events] == ["started", "lost", "resumed", "grown"]
        assert trainer.apply_all_workers(os.getpid)[0] == survivor
        trainer.save(tmp_path / "model.pt")
    with make_trainer(3, use_local=True) as trainer:
        trainer.load(tmp_path / "model.pt")
        trained += train(trainer, None)
        assert (trained, hash_of(trainer)) == expected
