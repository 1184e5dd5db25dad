"""Optimizers, schedulers, data, and other options, by config or by subclass."""

import inspect
import re

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import operators
from raysgd.operators import (
    ConfiguredOperator,
    ImageClassifier,
    LanguageModel,
    Regressor,
    SemanticSegmenter,
    SequenceClassifier,
    SupervisedOperator,
)
from raysgd.testing import run_operator
from raysgd.utils import BATCH_SIZE
from tests.operators import Streamed, local

DATA = (torch.arange(12.0).reshape(6, 2), torch.arange(6.0))


def build(operator_cls=Regressor, arguments=None, **config):
    config = {"model": torch.nn.Linear(2, 1), "train_data": DATA, **config}
    return run_operator(operator_cls, config, **(arguments or {}))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)],
)
def test_an_optimizer_by_name(name, kind):
    optimizer = build(optimizer=name, lr=0.25, weight_decay=0.5, momentum=0.75).optimizer
    assert type(optimizer) is kind
    assert (optimizer.defaults["lr"], optimizer.defaults["weight_decay"]) == (0.25, 0.5)
    assert optimizer.defaults.get("momentum", 0.75) == 0.75


def test_an_optimizer_by_function():
    made = build(optimizer=lambda p, config: torch.optim.RMSprop(p, config["lr"]), lr=0.25)
    assert type(made.optimizer) is torch.optim.RMSprop
    assert made.optimizer.defaults["lr"] == 0.25


def test_a_scheduler_can_count_the_steps_of_an_epoch():
    class Scheduled(Regressor):
        def build_scheduler(self, optimizer, config):
            assert self.steps_per_epoch == 3  # batches of two of the six samples
            return config["scheduler"](optimizer, self.steps_per_epoch)

    config = {"model": torch.nn.Linear(2, 1), "train_data": DATA, "batch_size": 2}
    config["scheduler"] = torch.optim.lr_scheduler.StepLR
    with local(Scheduled, config, scheduler_step_freq="batch") as trainer:
        trainer.train()
        (scheduler,) = trainer.get_local_operator()._train_state.schedulers
        assert scheduler.last_epoch == 3


@pytest.mark.parametrize("form", ["tensors", "arrays", "dataset", "function"])
def test_data_sets_get_a_loader(form):
    data = {"tensors": DATA, "dataset": TensorDataset(*DATA), "function": lambda config: DATA}
    data["arrays"] = tuple(column.numpy() for column in DATA)
    operator = build(train_data=data[form], validation_data=data[form], batch_size=4)
    assert [len(batch[0]) for batch in operator.train_loader] == [4, 2]
    targets = torch.cat([target for _, target in operator.validation_loader])
    assert targets.tolist() == DATA[1].tolist()


def test_training_data_are_shuffled_and_the_global_batch_is_heeded():
    data = (torch.zeros(100, 2), torch.arange(100.0))
    operator = build(train_data=data, **{BATCH_SIZE: 100})
    (batch,) = operator.train_loader
    assert batch[1].tolist() != data[1].tolist()
    assert sorted(batch[1].tolist()) == data[1].tolist()


def test_loaders_and_iterable_data_sets_are_used_as_they_are():
    loader = DataLoader(TensorDataset(*DATA), batch_size=1)
    assert len(build(train_data=loader).train_loader) == 6

    stream = Streamed(list(zip(*DATA, strict=True)))
    assert [len(b[1]) for b in build(train_data=stream, batch_size=4).train_loader] == [4, 2]


def test_each_part_can_be_overridden():
    class Own(Regressor):
        def build_model(self, config):
            return torch.nn.Linear(2, config["width"])

        def build_optimizer(self, parameters, config):
            return torch.optim.Rprop(parameters)

        def build_train_data(self, config):
            return DATA

        def build_validation_data(self, config):
            return DATA[0][:2], DATA[1][:2]

    operator = run_operator(Own, {"width": 1})
    assert type(operator.optimizer) is torch.optim.Rprop
    assert len(operator.validation_loader.dataset) == 2


def test_workers_draw_different_random_numbers_in_training(monkeypatch):
    """With equal random numbers, all workers would use the same dropout and noise."""
    models, draws = [], []
    for rank in (0, 1, 2, 0):
        monkeypatch.setattr(ConfiguredOperator, "world_rank", rank)
        operator = build(model=lambda config: torch.nn.Linear(2, 1), seed=3)
        models.append(operator.model.weight.tolist())
        draws.append(torch.rand(1).item())
    assert models[0] == models[1] == models[2] == models[3]
    assert draws[0] == draws[3]
    assert len(set(draws)) == 3


# ---- options


def test_a_misspelled_key_causes_a_warning_and_others_are_ignored(caplog):
    config = {"model": torch.nn.Linear(2, 1), "depth": 3, "learning": 1, 7: "seven"}
    operator = run_operator(Regressor, config)
    assert not caplog.text
    assert operator.config["depth"] == 3
    build(optimiser="sgd")
    assert "Regressor has no option 'optimiser'. Did you mean 'optimizer'?" in caplog.text


def test_numpy_numbers_are_accepted():
    operator = build(lr=np.float32(0.5), gradient_accumulation_steps=np.int64(2))
    assert operator._train_state.accumulation_steps == 2
    assert operator.optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"optimizer": "sdg"}, "config['optimizer']='sdg' must be 'adam', 'adamw', 'sgd', or a"),
        ({"loss": "mean"}, "config['loss']='mean' must be one of 'mse', 'l1', 'huber'"),
        ({"lr": -1}, "learning rate: -1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0): must be at least 1"),
        ({"batch_size": 8, BATCH_SIZE: 16}, "both 'batch_size'=8"),
        ({"model": None}, "override build_model in Regressor"),
        ({"model": lambda config: 3}, "config['model'] must be a torch.nn.Module"),
    ],
)
def test_an_error_names_the_wrong_value(config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(**config)


EXPORTED = [getattr(operators, name) for name in operators.__all__]
OPERATORS = [exported for exported in EXPORTED if hasattr(exported, "OPTIONS")]


@pytest.mark.parametrize("operator_cls", OPERATORS, ids=lambda cls: cls.__name__)
def test_the_table_of_an_operator_lists_its_options_with_their_defaults(operator_cls):
    inherited = getattr(operator_cls.__mro__[1], "OPTIONS", {})
    listed = dict(re.findall(r"^``(\w+)``  +(\S+)", inspect.getdoc(operator_cls), re.MULTILINE))
    own = {
        key: repr(default).replace("'", '"')
        for key, default in operator_cls.OPTIONS.items()
        if inherited.get(key, ...) != default
    }
    assert listed == own


# ---- the weight of an update


TOKENS = torch.tensor([[1, 2, 3], [1, -100, -100]])
MASKS = torch.tensor([[[0, 1], [255, 255]]], dtype=torch.uint8)
CONV = torch.nn.Conv2d(3, 2, 1)


@pytest.mark.parametrize(
    ("operator_cls", "config", "batch", "counts"),
    [
        (LanguageModel, {"vocab_size": 5, "hidden_size": 4}, (TOKENS.abs() % 5, TOKENS), [4]),
        (LanguageModel, {"vocab_size": 5, "hidden_size": 4}, (TOKENS[:1],), [2]),
        (SemanticSegmenter, {"model": CONV}, (torch.ones(1, 3, 2, 2), MASKS), [2]),
        (ImageClassifier, {"model": torch.nn.Linear(3, 2)}, (torch.ones(4, 3), torch.ones(4)), []),
    ],
)
def test_ignored_targets_do_not_count_in_a_workers_weight(operator_cls, config, batch, counts):
    operator, found = run_operator(operator_cls, config), []

    exchange = operator._train_state.exchange
    exchange.all_reduce_sum = lambda count: found.append(count) or count
    operator.train_batch(batch, {})
    assert found == counts


class Embedding(torch.nn.Embedding):
    def forward(self, input_ids):
        return super().forward(input_ids)


READY_MADE = [getattr(operators, name) for name in operators.__all__]
PREDICTORS = [each for each in READY_MADE if issubclass(each, SupervisedOperator)]


@pytest.mark.parametrize("operator_cls", sorted({*PREDICTORS} - {SupervisedOperator}, key=str))
def test_batches_to_predict_need_no_target(operator_cls):
    model, features, seen = CONV, torch.ones(2, 3, 2, 2), slice(None)
    if operator_cls in (LanguageModel, SequenceClassifier):
        model, features = Embedding(5, 2), torch.tensor([[1, 2], [3, 4]])
    if operator_cls is LanguageModel:  # the last token is a target
        seen = slice(-1)
    operator = run_operator(operator_cls, {"model": model})
    for batch in (features, [features], (features,)):
        assert torch.equal(operator.predict_batch(batch, {}), model(features[:, seen]))
