"""Operators from creator functions."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import CreatorOperator, TrainingOperator
from raysgd.testing import run_operator


def model_creator(config):
    return torch.nn.Linear(2, 2)


def models_creator(config):
    return [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]


def optimizer_creator(models, config):
    if isinstance(models, list):
        return tuple(torch.optim.SGD(m.parameters(), lr=config.get("lr", 0.1)) for m in models)
    return torch.optim.SGD(models.parameters(), lr=config.get("lr", 0.1))


def scheduler_creator(optimizers, config):
    if isinstance(optimizers, tuple):
        return [torch.optim.lr_scheduler.StepLR(o, 1) for o in optimizers]
    return torch.optim.lr_scheduler.StepLR(optimizers, 1)


def make_loader(size=8):
    data = TensorDataset(torch.randn(size, 2), torch.zeros(size, dtype=torch.long))
    return DataLoader(data, batch_size=4)


def data_creator(config):
    return make_loader(), make_loader(4)


def test_everything_single():
    operator_cls = TrainingOperator.from_creators(
        model_creator,
        optimizer_creator,
        data_creator,
        torch.nn.CrossEntropyLoss,
        scheduler_creator,
    )
    assert issubclass(operator_cls, CreatorOperator)
    operator = run_operator(operator_cls, {"lr": 0.5}, scheduler_step_freq="epoch")
    assert operator.models is operator.model
    assert operator.optimizers is operator.optimizer
    assert operator.schedulers is operator.scheduler
    assert isinstance(operator.criterion, torch.nn.CrossEntropyLoss)
    assert operator.optimizer.param_groups[0]["lr"] == 0.5
    assert operator.train_epoch(iter(operator.train_loader))["num_samples"] == 8
    assert operator.validate(iter(operator.validation_loader))["num_samples"] == 4


def test_everything_in_several():
    operator_cls = TrainingOperator.from_creators(
        models_creator, optimizer_creator, scheduler_creator=scheduler_creator
    )
    operator = run_operator(operator_cls, scheduler_step_freq="manual")
    assert len(operator.models) == len(operator.optimizers) == len(operator.schedulers) == 2
    assert operator.model is operator.models[0]
    assert operator.optimizer is operator.optimizers[0]
    assert operator.scheduler is operator.schedulers[0]


def test_only_what_is_required():
    operator = run_operator(TrainingOperator.from_creators(model_creator, optimizer_creator))
    assert operator.criterion is None
    assert not hasattr(operator, "scheduler")
    assert not hasattr(operator, "schedulers")
    with pytest.raises(RuntimeError, match=r"no self\.criterion"):
        operator.train_batch((torch.ones(1, 2), torch.zeros(1, dtype=torch.long)), {})
    with pytest.raises(RuntimeError, match="no train loader"):
        _ = operator.train_loader


def test_a_loss_may_be_a_function_of_the_config():
    operator_cls = TrainingOperator.from_creators(
        model_creator, optimizer_creator, loss_creator=lambda config: torch.nn.MSELoss()
    )
    assert isinstance(run_operator(operator_cls).criterion, torch.nn.MSELoss)


@pytest.mark.parametrize("loaders", [make_loader(), [make_loader()]])
def test_data_creator_may_return_one_loader(loaders):
    operator_cls = TrainingOperator.from_creators(
        model_creator, optimizer_creator, lambda config: loaders
    )
    assert len(run_operator(operator_cls).train_loader) == 2


def test_more_than_two_loaders_are_refused():
    operator_cls = TrainingOperator.from_creators(
        model_creator, optimizer_creator, lambda config: [make_loader()] * 3
    )
    with pytest.raises(ValueError, match="returned 3 loaders"):
        run_operator(operator_cls)


@pytest.mark.parametrize("serialize", [True, False])
def test_data_is_created_under_a_lock_of_the_node(serialize, monkeypatch, tmp_path):
    from raysgd.torch.interop import creators as creator_operator

    held = []

    class Lock:
        def __init__(self, path):
            held.append(path)

        def __enter__(self):
            held.append("locked")

        def __exit__(self, *exception):
            held.append("free")

    monkeypatch.setattr(creator_operator, "FileLock", Lock)

    def create(config):
        held.append("created")
        return make_loader()

    run_operator(
        TrainingOperator.from_creators(
            model_creator, optimizer_creator, create, serialize_data_creation=serialize
        )
    )
    assert held[-3:] == ["locked", "created", "free"] if serialize else held == ["created"]


@pytest.mark.parametrize("name", ["model_creator", "data_creator"])
def test_creator_that_is_not_callable_is_an_error(name):
    creators = {"model_creator": model_creator, "optimizer_creator": optimizer_creator, name: 7}
    with pytest.raises(TypeError, match=rf"from_creators\({name}=...\) must be a function"):
        TrainingOperator.from_creators(**creators)


def test_a_subclass_keeps_what_it_overrides():
    class Counting(TrainingOperator):
        def train_batch(self, batch, batch_info):
            return {"mine": 1.0}

    class CountingCreator(CreatorOperator):
        def train_batch(self, batch, batch_info):
            return {"mine": 1.0}

    for base in (Counting, CountingCreator):
        operator = run_operator(base.from_creators(model_creator, optimizer_creator, data_creator))
        assert isinstance(operator, base)
        assert operator.train_epoch(iter(operator.train_loader))["mine"] == 1.0
