"""Operators from creator functions."""

import contextlib

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TrainingOperator
from raysgd._internal import files
from raysgd.testing import run_operator


def model_creator(config):
    return torch.nn.Linear(2, 2)


def optimizer_creator(model, config):
    return torch.optim.SGD(model.parameters(), lr=config.get("lr", 0.1))


def make_loader(size=8):
    data = TensorDataset(torch.randn(size, 2), torch.zeros(size, dtype=torch.long))
    return DataLoader(data, batch_size=4)


def data_creator(config):
    return make_loader(), make_loader(4)


def step_lr(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def test_creators_may_return_single_objects():
    operator_cls = TrainingOperator.from_creators(
        model_creator,
        optimizer_creator,
        data_creator,
        torch.nn.CrossEntropyLoss,
        lambda optimizer, config: step_lr(optimizer),
    )
    operator = run_operator(operator_cls, {"lr": 0.5}, scheduler_step_freq="epoch")
    for name in ("model", "optimizer", "scheduler"):
        assert getattr(operator, f"{name}s") is getattr(operator, name)
    assert isinstance(operator.criterion, torch.nn.CrossEntropyLoss)
    assert operator.optimizer.param_groups[0]["lr"] == 0.5
    assert operator.train_epoch(iter(operator.train_loader))["num_samples"] == 8
    assert operator.validate(iter(operator.validation_loader))["num_samples"] == 4


def test_creators_may_return_several_objects():
    operator_cls = TrainingOperator.from_creators(
        lambda config: [torch.nn.Linear(2, 2) for _ in "ab"],
        lambda models, config: tuple(optimizer_creator(model, config) for model in models),
        loss_creator=lambda config: torch.nn.MSELoss(),
        scheduler_creator=lambda optimizers, config: [*map(step_lr, optimizers)],
    )
    operator = run_operator(operator_cls, scheduler_step_freq="manual")
    for name in ("model", "optimizer", "scheduler"):
        first, _ = getattr(operator, f"{name}s")
        assert getattr(operator, name) is first
    assert isinstance(operator.criterion, torch.nn.MSELoss)


def test_only_model_and_optimizer_creators_are_required():
    operator = run_operator(TrainingOperator.from_creators(model_creator, optimizer_creator))
    assert operator.criterion is None
    assert not hasattr(operator, "scheduler")
    assert not hasattr(operator, "schedulers")


@pytest.mark.parametrize("number", [None, 1, 3])
def test_data_creator_may_return_one_loader_but_not_three(number):
    operator_cls = TrainingOperator.from_creators(
        model_creator,
        optimizer_creator,
        lambda config: [make_loader()] * number if number else make_loader(),
    )
    if number == 3:
        with pytest.raises(ValueError, match="returned 3 loaders"):
            run_operator(operator_cls)
    else:
        assert len(run_operator(operator_cls).train_loader) == 2


@pytest.mark.parametrize("serialize", [True, False])
def test_data_is_created_under_a_lock_of_the_node(serialize, monkeypatch):
    held = []

    @contextlib.contextmanager
    def lock(path):
        held.append("locked")
        yield
        held.append("free")

    def create(config):
        held.append("created")
        return make_loader()

    monkeypatch.setattr(files, "FileLock", lock)
    run_operator(
        TrainingOperator.from_creators(
            model_creator, optimizer_creator, create, serialize_data_creation=serialize
        )
    )
    assert held == (["locked", "created", "free"] if serialize else ["created"])


@pytest.mark.parametrize("name", ["model_creator", "data_creator"])
def test_creator_that_is_not_callable_is_an_error(name):
    given = {"model_creator": model_creator, "optimizer_creator": optimizer_creator, name: 7}
    with pytest.raises(TypeError, match=rf"from_creators\({name}=...\) must be a function"):
        TrainingOperator.from_creators(**given)
