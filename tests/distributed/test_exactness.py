"""Results equal those of one plain PyTorch process, whatever the number of workers."""

import os

import pytest
import torch
from torch.utils.data import DataLoader

from raysgd import TorchTrainer
from tests.operators import NUM_SAMPLES, Classifier, make_data, make_model, parameters, replica_hash
from tests.shared import Shared
from tests.stranger import stranger


def plain_validation(model, batch_size):
    """Validate as a hand-written loop in one process does."""
    criterion, loss, correct = torch.nn.CrossEntropyLoss(reduction="sum"), 0.0, 0
    model.eval()
    with torch.no_grad():
        for features, target in DataLoader(make_data(), batch_size=batch_size):
            output = model(features)
            loss += criterion(output, target).item()
            correct += int((output.argmax(dim=1) == target).sum())
    return {
        "num_samples": NUM_SAMPLES,
        "val_loss": loss / NUM_SAMPLES,
        "val_accuracy": correct / NUM_SAMPLES,
    }


def plain_training(num_steps, batch_size, batch_norm=False):
    """Train as a hand-written loop in one process does; return the model."""
    model = make_model(batch_norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = torch.nn.CrossEntropyLoss()
    batches = iter(DataLoader(make_data(), batch_size=batch_size))
    for _ in range(num_steps):
        features, target = next(batches)
        optimizer.zero_grad()
        criterion(model(features), target).backward()
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def three_workers(module_cluster):
    """Three workers that start and train while another process attacks their ports."""
    config = {"batch_size": 16, "shuffle": False, "momentum": 0.9, "loader_workers": 1}
    with (
        stranger() as attacked,
        TorchTrainer(
            training_operator_cls=Classifier, config=config, num_workers=3, timeout_s=120
        ) as trainer,
    ):
        pids = trainer.apply_all_workers(os.getpid)
        yield Shared(trainer)
    attacked.check(pids)


@pytest.fixture
def three(three_workers):
    return three_workers.fresh().trainer


def check_validation(trainer, batch_size):
    """Check that metrics equal those of one process, and that validation changes no weights."""
    before = trainer.get_model().state_dict()
    metrics = trainer.validate()
    expected = plain_validation(trainer.get_model(), batch_size)
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, abs=1e-6)
    after = trainer.get_model().state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_validation_equals_a_single_process(three):
    check_validation(three, 16)
    three.train()
    check_validation(three, 16)


def test_validation_of_batch_norm_equals_a_single_process(module_cluster):
    config = {"batch_norm": True, "momentum": 0.9, "batch_size": 31}
    for num_workers in (1, 2):
        with TorchTrainer(
            training_operator_cls=Classifier,
            config=config,
            num_workers=num_workers,
            use_local=True,
            use_gpu=False,
        ) as trainer:
            trainer.train(num_steps=4)
            check_validation(trainer, 31)
            assert len(set(trainer.apply_all_operators(replica_hash))) == 1


def test_three_workers_equal_one_process_with_three_times_the_batch(three):
    three.train(num_steps=1)
    three.train(num_steps=9)
    found = three.apply_all_operators(parameters)
    expected = torch.cat([p.reshape(-1) for p in plain_training(10, 48).parameters()]).detach()
    assert all(torch.equal(found[0], each) for each in found)
    assert torch.allclose(found[0], expected, atol=1e-6, rtol=0)


class Centers(torch.nn.Module):
    """A loss with parameters: the distance to the center of each class."""

    def __init__(self):
        super().__init__()
        self.centers = torch.nn.Parameter(torch.rand(2, 2))  # differs between workers
        self.register_buffer("scale", torch.ones(2))

    def forward(self, output, target):
        return ((output - self.centers[target]) * self.scale).square().mean()


class Centered(Classifier):
    def register(self, *, models, optimizers, criterion):
        criterion = Centers()
        optimizers.add_param_group({"params": criterion.parameters()})
        return super().register(models=models, optimizers=optimizers, criterion=criterion)

    def setup(self, config):
        torch.seed()
        super().setup(config)

    def train_batch(self, batch, batch_info):
        features, target = batch
        output = self.model(features)
        loss = self.criterion(output, target) + self.criterion(output / 2, target)
        self.backward(loss)
        self.optimizer_step(self.optimizer)
        return {"train_loss": loss.detach(), "num_samples": len(target)}


def centers_of(operator):
    return operator.criterion.centers.tolist()


def test_a_criterion_that_learns_is_the_same_on_all_workers_and_is_saved(module_cluster, tmp_path):
    with TorchTrainer(
        training_operator_cls=Centered, num_workers=2, use_local=True, use_gpu=False
    ) as trainer:
        trainer.train()
        trainer.validate()
        assert len(set(trainer.apply_all_operators(replica_hash))) == 1
        assert isinstance(trainer.get_model(), torch.nn.Sequential)
        trainer.save(tmp_path / "state.pt")
        (held, same) = trainer.apply_all_operators(centers_of)
        assert held == same
    with TorchTrainer(training_operator_cls=Centered, use_local=True) as trainer:
        trainer.load(tmp_path / "state.pt")
        assert centers_of(trainer.get_local_operator()) == held
