"""Horovod instead of DistributedDataParallel: identical replicas, also in a new group.

The tests share two workers. Their operator uses all features that Horovod must support.
"""

import time

import pytest
import torch
from torch.utils.data import DataLoader

from raysgd import ElasticConfig, TorchTrainer, TrainingOperator
from raysgd.errors import ReplicasDifferError
from raysgd.testing import chaos
from tests.conftest import import_horovod, wait_until
from tests.faulty import pids_of
from tests.operators import make_data, make_model, parameters, replica_hash

import_horovod()


class Watching(torch.nn.Module):
    """Returns its input, and keeps a running mean of it as batch normalization does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.mean(dim=0), 0.1)
        return x


class Everything(TrainingOperator):
    """Uses accumulation, gradient clipping, a schedule, and a weighted loss.

    Sends gradients as float16 if `compresses` is set.
    """

    compresses = False

    def setup(self, config):
        model = torch.nn.Sequential(Watching(), make_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer, self.criterion, _ = self.register(
            models=model,
            optimizers=optimizer,
            criterion=torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0])),
            schedulers=torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
            gradient_accumulation_steps=2,
            max_grad_norm=1.0,
            horovod_args={"compression": self.compression()} if config["horovod"] else None,
        )
        loader = DataLoader(make_data(), batch_size=config["batch_size"])
        self.register_data(train_loader=loader, validation_loader=loader)

    def num_items(self, batch):
        return self.criterion.weight[batch[1]].sum()

    def train_batch(self, batch, batch_info):
        if self.config["horovod"] and self.world_size == 1:
            time.sleep(0.02)  # leave the CPU to the starting replacement
        return super().train_batch(batch, batch_info)

    def state_dict(self):
        return {"compresses": self.compresses}

    def load_state_dict(self, state):
        self.compresses = state["compresses"]

    def compression(self):
        import horovod.torch as hvd

        operator = self

        class Switched(hvd.Compression.fp16):
            @staticmethod
            def compress(tensor):
                if operator.compresses:
                    return hvd.Compression.fp16.compress(tensor)
                return tensor, tensor.dtype

        return Switched


@pytest.fixture(scope="module")
def trainer(module_cluster):
    with TorchTrainer(
        training_operator_cls=Everything,
        config={"horovod": True, "batch_size": 16},
        num_workers=2,
        backend="horovod",
        scheduler_step_freq="epoch",
        elastic=ElasticConfig(backoff_initial_s=0.2, resize_cooldown_s=0.0),
        timeout_s=120,
    ) as made:
        yield made


@pytest.fixture(scope="module")
def start(trainer):
    """The state before the first step."""
    return trainer.state_dict()


def hashes(trainer):
    return set(trainer.apply_all_operators(replica_hash))


def compress(operator):
    operator.compresses = True


def fail_once(operator):
    if operator.world_rank == 1:
        step, original = operator.global_step + 3, operator.train_batch

        def train_batch(batch, batch_info):
            if batch_info["global_step"] == step:
                operator.train_batch = original
                raise ValueError("bad batch")
            return original(batch, batch_info)

        operator.train_batch = train_batch


@pytest.mark.slow("two workers start")
def test_k_steps_of_two_workers_are_those_of_one_with_twice_the_batch(trainer, start):
    trainer.load_state_dict(start)
    before = trainer.apply_all_operators(parameters)[0]
    trainer.train(num_steps=20)
    found = trainer.apply_all_operators(parameters)[0]
    assert (found - before).abs().max() > 0.01
    with TorchTrainer(
        training_operator_cls=Everything,
        config={"horovod": False, "batch_size": 32},
        scheduler_step_freq="epoch",
        use_local=True,
    ) as alone:
        alone.train(num_steps=20)
        expected = alone.apply_all_operators(parameters)[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.slow("a worker is lost, and another one starts")
def test_workers_stay_identical_also_after_losses_and_errors(trainer, start, tmp_path):
    trainer.load_state_dict(start)
    trainer.apply_all_operators(compress)
    for epoch in (1, 2):
        result = trainer.train()
        assert (result["epoch"], result["num_samples"]) == (epoch, 1003)
        assert len(hashes(trainer)) == 1
    rates = trainer.apply_all_operators(lambda op: op.optimizer.param_groups[0]["lr"])
    assert rates == [0.025, 0.025]
    assert trainer.validate()["num_samples"] == 1003
    before = pids_of(trainer)

    trainer.apply_all_operators(fail_once)
    with pytest.raises(ValueError, match="bad batch"):
        trainer.train()
    assert trainer.train(max_retries=0)["epoch"] == 3
    assert pids_of(trainer) == before
    assert len(hashes(trainer)) == 1

    step = trainer.global_step
    with chaos.Chaos(trainer, [chaos.Fault(rank=1, step=step + 5)]) as injected:
        assert trainer.train()["epoch"] == 4
        wait_until(lambda: not injected.pending)  # a busy driver may kill late
    assert trainer.global_step == step + 32
    assert before[0] in pids_of(trainer)  # the survivor kept its process
    wait_until(lambda: trainer.num_workers == 2 or not trainer.train(), timeout_s=60)
    assert len(hashes(trainer)) == 1
    kinds = [event.kind for event in trainer.events]
    assert "lost" in kinds
    assert "grown" in kinds
    path = trainer.save(tmp_path / "state.pt")
    trainer.train(num_steps=3)
    trainer.load(path)
    assert len(hashes(trainer)) == 1


def differ(operator):
    if operator.world_rank == 1:
        operator.optimizer.param_groups[0]["lr"] = 0.3
        with torch.no_grad():
            operator.model[1][0].bias += 1


def test_difference_between_replicas_is_an_error(trainer, start):
    trainer.load_state_dict(start)
    trainer.train(num_steps=2)
    trainer.apply_all_operators(differ)
    with pytest.raises(ReplicasDifferError) as caught:
        trainer.train(num_steps=2)
    assert "['lr'] (0.1 on worker 0, 0.3 on worker 1)" in str(caught.value)
    assert "models[0].1.0.bias" in str(caught.value)
    trainer.load_state_dict(start)
    trainer.train(num_steps=2)
    assert len(hashes(trainer)) == 1
