"""``exact="bits"``: kills, joins, and resumes on another number of workers do not change a bit."""

import time

import pytest

from raysgd import EqualBits, TorchTrainer
from raysgd.testing import chaos
from raysgd.utils import BATCH_SIZE
from tests.unit.torch.bits import CASES, NUM_SHARDS, Trains, digest

NUM_STEPS = 12
CASE = {**CASES["perceptron"], "num_samples": 24 * NUM_STEPS}


class Slow(Trains):
    def train_batch(self, batch, batch_info):
        time.sleep(0.01)  # so that a worker is killed within an epoch
        return super().train_batch(batch, batch_info)


def make_trainer(num_workers, use_local=False):
    return TorchTrainer(
        training_operator_cls=Slow,
        config={"case": CASE, BATCH_SIZE: 24},
        num_workers=num_workers,
        num_cpus_per_worker=1,
        use_gpu=False,
        exact=EqualBits(NUM_SHARDS),
        scheduler_step_freq="batch",
        use_local=use_local,
    )


def result_of(trainer):
    state, metrics = trainer.state_dict(), trainer.validate()
    kept = {name: metrics[name] for name in ("val_loss", "val_accuracy", "num_samples")}
    return digest([state["models"], state["optimizers"], state["schedulers"], kept])


@pytest.fixture(scope="module")
def undisturbed(module_cluster):
    with make_trainer(1, use_local=True) as trainer:
        trainer.train()
        trainer.train()
        return result_of(trainer)


def test_kills_and_joins_do_not_change_a_bit(undisturbed):
    with make_trainer(3) as trainer:
        faults = [chaos.Fault(rank=1, step=4), chaos.Fault(rank=0, step=NUM_STEPS + 6)]
        with chaos.Chaos(trainer, faults) as injected:
            trainer.train()
            trainer.train()
        assert len(injected.injected) == len(faults)
        assert result_of(trainer) == undisturbed


def test_a_resume_on_another_number_of_workers_does_not_change_a_bit(undisturbed, tmp_path):
    with make_trainer(3) as trainer:
        trainer.train(num_steps=7)
        trainer.save(tmp_path / "model.pt")
    with make_trainer(2) as trainer:
        trainer.load(tmp_path / "model.pt")
        trainer.train()
        trainer.train()
        assert result_of(trainer) == undisturbed
