"""``exact="bits"``: kills, joins, and resumes on another number of workers do not change a bit."""

import contextlib
import os
import signal
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.equal_bits import Slow, hash_of, make_trainer
from tests.unit.torch.bits import Case
from tests.unit.torch.cases import FLOAT16

CASE = Case(num_samples=24 * 12, settings=FLOAT16)


class Killed(Slow):
    def train_batch(self, batch, batch_info):
        metrics = super().train_batch(batch, batch_info)
        self.step_schedulers()
        fault, has_updated = self.config["fault"], self._train_state.update.in_last_micro_batch
        is_due = has_updated and self.world_rank == 1 and self.global_step == 6
        if fault is not None and is_due:
            with contextlib.suppress(FileExistsError):  # a replacement lives
                Path(fault).touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return metrics


def killed_trainer(num_workers, fault=None, **settings):
    settings |= {"operator_cls": Killed, "scheduler_step_freq": "manual"}
    return make_trainer(CASE, num_workers, config={"fault": fault}, **settings)


@pytest.mark.slow("workers are lost and replaced, and others resume")
def test_losses_joins_and_a_resume_on_one_worker_do_not_change_a_bit(module_cluster, tmp_path):
    """A step counts only with the metrics of a lost worker. A survivor can discard its update."""

    def train(trainer, *num_steps):
        return [trainer.train(num_steps=number) for number in num_steps]

    with killed_trainer(1, use_local=True) as alone:
        trained = train(alone, None, 7, None)
        expected = trained, hash_of(alone)
    with killed_trainer(2, tmp_path / "killed") as trainer:
        survivor = trainer.apply_all_workers(os.getpid)[0]
        trained = train(trainer, None)
        wait_until(lambda: trainer.num_workers == 2 or not trainer.validate(), 60)
        trained += train(trainer, 7)
        assert [event.kind for event in trainer.events] == ["started", "lost", "regrouped", "grown"]
        assert trainer.apply_all_workers(os.getpid)[0] == survivor
        trainer.save(tmp_path / "model.pt")
    with killed_trainer(1, use_local=True) as alone:
        alone.load(tmp_path / "model.pt")
        trained += train(alone, None)
        assert (trained, hash_of(alone)) == expected
