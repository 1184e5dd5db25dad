"""Real workers are lost and replaced, and what is learnt is what one plain process learns."""

import time

import pytest
import torch

from raysgd import ElasticConfig, TorchTrainer
from raysgd.testing import chaos
from raysgd.testing.chaos import Chaos, Fault
from raysgd.utils import BATCH_SIZE
from tests.fidelity import Exact, flat, plain_run

CONFIG = {"num_samples": 203, "num_epochs": 3, "shuffle": True, BATCH_SIZE: 14}
"""Neither the samples nor a step divide by any number of workers."""


class Waiting(Exact):
    """So slow in a smaller group that replacement workers arrive long before the end."""

    def train_batch(self, batch, batch_info):
        if self.world_size < self.config.get("until_size", 0):
            time.sleep(0.2)
        return super().train_batch(batch, batch_info)


def train_on(trainer):
    """Train the epochs that are left, and let the third schedule react to each."""
    while trainer.global_step < 45:
        trainer.train()
        react(trainer)


def react(trainer):
    loss = trainer.validate()["val_loss"]
    trainer.apply_all_operators(lambda operator: operator.plateau.step(loss))


def check(trainer):
    expected, num_steps = plain_run(CONFIG, CONFIG[BATCH_SIZE], reacts=True)
    assert trainer.global_step == num_steps == 45
    torch.testing.assert_close(flat(trainer.get_model()), expected, rtol=0.0, atol=1e-10)
    schedules = trainer.apply_all_operators(
        lambda operator: [scheduler.last_epoch for scheduler in operator.schedulers]
    )
    assert schedules == [[num_steps, num_steps]] * trainer.num_workers


def go_on_with_others(saved):
    """Train to the end on five, on three and on one; who is lost is not replaced."""
    with TorchTrainer(
        training_operator_cls=Waiting,
        config=CONFIG,
        num_workers=5,
        use_local=True,
        scheduler_step_freq="batch",
        elastic=ElasticConfig(grow=False),
    ) as trainer:
        for size in (5, 3, 1):
            for rank in range(size, trainer.num_workers):
                chaos.kill(trainer, rank)
            trainer.load(saved)
            assert (trainer.num_workers, trainer.global_step) == (size, 19)
            train_on(trainer)
            check(trainer)


@pytest.mark.slow("eight workers start, two of which are killed and replaced")
def test_a_run_with_losses_and_growth_learns_what_one_process_does_also_on_other_numbers(
    module_cluster, tmp_path
):
    saved = tmp_path / "state.pt"
    with TorchTrainer(
        training_operator_cls=Waiting,
        config={**CONFIG, "until_size": 4},
        num_workers=4,
        scheduler_step_freq="batch",
        elastic=ElasticConfig(resize_cooldown_s=0.0),
    ) as trainer:
        assert trainer.config[BATCH_SIZE] == 14
        faults = [Fault(rank=1, step=3), Fault(rank=0, step=21)]
        with Chaos(trainer, faults) as injected:
            trainer.train()
            react(trainer)
            trainer.train(num_steps=4)
            trainer.save(saved)
            train_on(trainer)
        assert not injected.pending
        kinds = [event.kind for event in trainer.events]
        assert kinds.count("lost") == 2
        assert "grown" in kinds
        largest = trainer.apply_all_operators(lambda operator: operator.largest)
        assert max(largest) <= 4
        check(trainer)
    go_on_with_others(saved)
