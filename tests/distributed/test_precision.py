"""Mixed precision and gradient accumulation on several workers, also if one is lost."""

import pytest
import torch

from raysgd import ElasticConfig
from tests.faulty import Faulty, faulty_trainer, fingerprints, order
from tests.ledger import wait_if_short
from tests.operators import NUM_SAMPLES, parameters
from tests.shared import Shared

HALF = {"use_fp16": True, "amp_dtype": torch.float16}


def scaler_of(trainer):
    states = trainer.apply_all_operators(
        lambda op: op._train_state.optimization.precision.state_dict()["amp_native"]
    )
    assert all(state == states[0] for state in states)
    return states[0]


class Stepper(torch.optim.Optimizer):
    """Adds 1 to the parameter of each sample in the accumulated gradient."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            gradient = -parameter.grad
            # the gradient of a mean over all accumulated samples sums to 1
            assert abs(gradient.sum().item() - 1) < 1e-4, gradient.sum()
            parameter += (gradient / gradient[gradient > 0].min()).round()


class Grouped(Faulty):
    """Accumulates three batches, and overflows on request. Its ledger gets the mean loss."""

    def register(self, *, models, optimizers, criterion):
        return super().register(
            models=models,
            optimizers=[optimizers[0], Stepper(models[1].parameters())],
            criterion=criterion,
            gradient_accumulation_steps=3,
        )

    def train_batch(self, batch, batch_info):
        step = batch_info["global_step"]
        self.maybe("train", step)
        wait_if_short(self, self.asked("until_size"))
        features, target, ids = batch
        with self.autocast():
            loss = self.criterion(self.model(features), target)
        overflow = self.take(f"overflow-{self.world_rank}-{step}")
        factor = 1.0 if overflow is None else float("inf")
        self.backward(loss * factor, num_samples=len(ids))
        self.optimizer_step(self.optimizer)
        self.backward(-self.ledger(ids).mean() * factor, num_samples=len(ids))
        self.optimizer_step(self.counter)
        return {"num_samples": len(ids)}


@pytest.fixture(scope="module")
def two_workers(module_cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("orders")
    with faulty_trainer(
        folder,
        2,
        Grouped,
        config={"batch_size": 16},
        elastic=ElasticConfig(snapshot_every=1),
        **HALF,
    ) as trainer:
        yield Shared(trainer, folder)


@pytest.fixture
def two(two_workers):
    return two_workers.fresh()


def trained(trainer):
    (first, *others) = trainer.apply_all_operators(parameters)
    assert all(torch.equal(first, other) for other in others)
    return first


def test_overflow_on_one_rank_skips_the_update_on_all(two):
    trainer = two.trainer
    trainer.train(num_steps=3)
    before = trained(trainer)
    order(two.folder, "overflow", 1, 3, "")
    order(two.folder, "overflow", 0, 8, "")
    for scale in (2.0**15, 2.0**14):
        trainer.train(num_steps=3)
        assert torch.equal(trained(trainer), before)
        assert scaler_of(trainer)["scale"] == scale
    trainer.train(num_steps=4)
    assert not torch.equal(trained(trainer), before)
    assert len(set(fingerprints(trainer))) == 1


def test_replacement_has_the_scaler_of_the_survivors(two):
    trainer = two.trainer
    order(two.folder, "overflow", 0, 1, "")
    order(two.folder, "train", 1, 10, "die")
    (two.folder / "until_size").write_text("2")
    metrics = trainer.train()
    assert two.kinds == ["lost", "resumed", "grown"]
    assert metrics["epoch"] == 1
    ledger = trainer.get_model()[1].weights.detach()
    # only the samples of the update that overflowed were not trained on
    assert int((ledger == 0).sum()) == 3 * 32
    assert 0 <= int(ledger.sum()) - (NUM_SAMPLES - 3 * 32) < 2
    assert len(set(fingerprints(trainer))) == 1
    assert scaler_of(trainer)["scale"] == 2.0**15
    # the tracker counts the updates before and after the loss, not the batches
    assert scaler_of(trainer)["_growth_tracker"] > 2
