"""Workers of different speeds: their shares change, but the result of training does not."""

import os
import signal
import time

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, TorchTrainer, TrainingOperator
from raysgd.utils import BATCH_SIZE
from tests.fidelity import flat
from tests.operators import register_with_sgd

NUM_SAMPLES, GLOBAL_BATCH = 960, 24


class Paced(TrainingOperator):
    """Linear regression in float64, with a cost per sample that depends on the worker."""

    def setup(self, config):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1).double()
        given = {"criterion": torch.nn.MSELoss(), **config["register"]}
        register_with_sgd(self, model, lr=0.05, momentum=0.9, **given)
        inputs = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(1)).double()
        data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
        self.register_data(
            train_loader=DataLoader(data, batch_size=config[BATCH_SIZE], shuffle=True),
            validation_loader=DataLoader(data, batch_size=config[BATCH_SIZE]),
        )

    def train_batch(self, batch, batch_info):
        costs = self.config["costs"]
        time.sleep(len(batch[0]) * costs[self.world_rank % len(costs)])
        return super().train_batch(batch, batch_info)


def make_trainer(num_workers, costs, register, use_local=True, **elastic):
    return TorchTrainer(
        training_operator_cls=Paced,
        config={BATCH_SIZE: GLOBAL_BATCH, "costs": costs, "register": register},
        num_workers=num_workers,
        use_local=use_local,
        use_gpu=False,
        elastic=ElasticConfig(**elastic),
    )


def train_until(trainer, kind, results):
    """Train until there are events of a kind, and return them."""
    while not (found := [event for event in trainer.events if event.kind == kind]):
        assert len(results) < 40, trainer.events
        results.append(trainer.train())
    return found


def expected(results, register):
    with make_trainer(1, [0.0], register) as trainer:
        for result in results:
            assert abs(trainer.train()["train_loss"] - result["train_loss"]) < 1e-10
        return flat(trainer.get_model()), trainer.validate()


def check(trainer, results, register):
    assert [result["num_samples"] for result in results] == [NUM_SAMPLES] * len(results)
    found, validation = expected(results, register)
    assert (flat(trainer.get_model()) - found).abs().max() < 1e-10
    assert abs(trainer.validate()["val_loss"] - validation["val_loss"]) < 1e-10


@pytest.mark.slow("shares change after some seconds, and a worker starts")
def test_measured_shares_change_no_result_through_losses_and_joins(module_cluster):
    register = {"gradient_accumulation_steps": 2, "max_grad_norm": 1.0}
    costs, results = [0.0025, 0.001], []
    elastic = {"shares": "measured", "resize_cooldown_s": 0.5}
    with make_trainer(2, costs, register, use_local=False, **elastic) as trainer:
        (event,) = train_until(trainer, "rebalanced", results)
        assert event.shares[1] > event.shares[0]
        os.kill(trainer.apply_all_workers(os.getpid)[1], signal.SIGKILL)
        train_until(trainer, "grown", results)
        results.append(trainer.train())
        check(trainer, results, register)
