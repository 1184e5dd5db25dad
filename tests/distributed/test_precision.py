"""Mixed precision and gradient accumulation on several workers, also if one is lost."""

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from raysgd import ElasticConfig, TorchTrainer
from tests.distributed.test_exactness import plain_training
from tests.faulty import Faulty, faulty_trainer, fingerprints, order
from tests.ledger import wait_if_short
from tests.operators import NUM_SAMPLES, Adversaries, Classifier, parameters, replica_hash
from tests.shared import Shared

HALF = {"use_fp16": True, "amp_dtype": torch.float16}


def scaler_of(trainer):
    states = trainer.apply_all_operators(
        lambda op: op._train_state.optimization.precision.state_dict()["amp_native"]
    )
    assert all(state == states[0] for state in states)
    return states[0]


# ---- a gradient scaler and accumulation


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


# ---- trainers with two workers, the first in the driver's process


def local(operator_cls, config, **arguments):
    return TorchTrainer(
        training_operator_cls=operator_cls,
        config=config,
        num_workers=2,
        use_local=True,
        use_gpu=False,
        **arguments,
    )


def test_adversaries_stay_identical_on_all_workers(module_cluster):
    with local(Adversaries, {"batch_size": 3, "times": 2}) as trainer:
        before = trainer.apply_all_operators(replica_hash)
        for _ in range(2):
            metrics = trainer.train()
        assert (metrics["num_samples"], metrics["batch_count"]) == (20, 4)
        after = trainer.apply_all_operators(replica_hash)
        assert len(set(after)) == 1
        assert after != before


class Accumulating(Classifier):
    """Counts how often gradients are exchanged."""

    def setup(self, config):
        super().setup(config)
        self.num_exchanges = 0
        self.model.register_comm_hook(None, self.exchange)

    def register(self, **given):
        return super().register(**given, gradient_accumulation_steps=3)

    def exchange(self, state, bucket):
        self.num_exchanges += 1
        return allreduce_hook(state, bucket)


def test_accumulation_on_two_workers_equals_one_process(module_cluster):
    """253 samples: fifteen full batches on each worker, then 7 and 6."""
    config = {"batch_size": 8, "shuffle": False, "momentum": 0.9, "num_samples": 253}
    with local(Accumulating, config) as trainer:
        trainer.train(num_steps=3)
        assert trainer.apply_all_operators(lambda op: op.num_exchanges) == [1, 1]
        trainer.validate()
        trainer.train(num_steps=9)
        assert trainer.apply_all_operators(lambda op: op.num_exchanges) == [4, 4]
        found = trainer.apply_all_operators(parameters)
        expected = torch.cat([p.reshape(-1) for p in plain_training(4, 48).parameters()]).detach()
        assert torch.equal(found[0], found[1])
        assert torch.allclose(found[0], expected, atol=1e-6, rtol=0)

        # both workers train on the uneven end of the epoch
        metrics = trainer.train()
        assert (metrics["num_samples"], metrics["batch_count"]) == (253 - 12 * 16, 4)
        assert trainer.apply_all_operators(lambda op: op.num_exchanges) == [6, 6]
        assert trainer.global_step == 16
        assert len(set(trainer.apply_all_operators(replica_hash))) == 1
