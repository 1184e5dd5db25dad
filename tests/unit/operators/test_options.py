"""Configs are checked at setup; errors name key, value and what is allowed."""

import re

import numpy as np
import pytest
import torch

from raysgd import operators
from raysgd.operators import GAN, ImageClassifier, LanguageModel, Regressor, SemanticSegmenter
from raysgd.operators.options import REQUIRED
from raysgd.testing import run_operator
from raysgd.utils import BATCH_SIZE

CONFIG = {"model": lambda config: torch.nn.Linear(2, 1), "train_data": None, "num_classes": 3}
OPERATORS = [
    cls
    for cls in (getattr(operators, name) for name in operators.__all__)
    if hasattr(cls, "OPTIONS")
]


def rejected(operator_cls, **config):
    with pytest.raises(ValueError, match=operator_cls.__name__) as caught:
        run_operator(operator_cls, {**CONFIG, **config})
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("lr", 0, "a number above 0.0"),
        ("lr", True, "a number above 0.0"),
        ("lr", float("nan"), "a number above 0.0"),
        ("optimizer", "sdg", '"adam", "adamw", "sgd" or a function'),
        ("weight_decay", -1, "a number of at least 0.0"),
        ("momentum", 1.5, "a number of at least 0.0 and at most 1.0"),
        ("scheduler", "cosine", "a function of (optimizer, config), or None"),
        ("gradient_accumulation_steps", 2.0, "an int of at least 1"),
        ("max_grad_norm", 0, "a number above 0.0 or None"),
        ("train_data", "digits.csv", "a torch Dataset"),
        ("train_data", np.zeros(2), "a torch Dataset"),
        ("batch_size", 0, "an int of at least 1"),
        ("seed", "x", "an int of at least 0 or None"),
        ("model", "resnet", "a torch.nn.Module or a function"),
        ("train_metrics", 1, "True or False"),
        ("loss", "mean", "'mse' or 'l1' or 'huber'"),
    ],
)
def test_an_error_names_the_value_and_what_is_allowed(key, value, allowed):
    message = rejected(Regressor, **{key: value})
    assert f"config[{key!r}]={value!r} must be {allowed}" in message


@pytest.mark.parametrize(
    ("operator_cls", "key", "value"),
    [
        (ImageClassifier, "label_smoothing", 1.5),
        (ImageClassifier, "mixup_alpha", -1),
        (ImageClassifier, "top_k", 0),
        (SemanticSegmenter, "ignore_index", "none"),
        (SemanticSegmenter, "num_classes", 1),
        (LanguageModel, "dropout", 1.0),
        (LanguageModel, "sequence_length", 0),
        (GAN, "latent_size", 0),
        (GAN, "label_smoothing", 0.5),
        (GAN, "generator", "dcgan"),
    ],
)
def test_each_operator_checks_its_own_options(operator_cls, key, value):
    assert f"config[{key!r}]={value!r} must be " in rejected(operator_cls, **{key: value})


def test_a_required_option_must_be_given():
    with pytest.raises(ValueError, match=r"config\['num_classes'\] is missing; it must be an int"):
        run_operator(SemanticSegmenter, {"model": torch.nn.Identity()})


def test_a_misspelled_key_causes_a_warning(caplog):
    run_operator(Regressor, {**CONFIG, "optimiser": "sgd"})
    assert "Regressor has no option 'optimiser'. Did you mean 'optimizer'?" in caplog.text


def test_other_keys_are_ignored(caplog):
    operator = run_operator(Regressor, {**CONFIG, "depth": 3, "learning": 1, 7: "seven"})
    assert not caplog.text
    assert operator.config["depth"] == 3


def test_numpy_numbers_are_accepted():
    operator = run_operator(
        Regressor, {**CONFIG, "lr": np.float32(0.5), "gradient_accumulation_steps": np.int64(2)}
    )
    assert operator._train_state.accumulation_steps == 2
    assert operator.optimizer.param_groups[0]["lr"] == 0.5


def test_two_batch_sizes_are_an_error():
    message = rejected(Regressor, batch_size=8, **{BATCH_SIZE: 16})
    assert "both 'batch_size'=8" in message


def test_a_missing_model_is_asked_for():
    with pytest.raises(ValueError, match="override build_model in Regressor"):
        run_operator(Regressor, {})
    with pytest.raises(ValueError, match="config\\['model'\\] returned 3"):
        run_operator(Regressor, {"model": lambda config: 3})


def test_unsuitable_data_is_named():
    with pytest.raises(ValueError, match=r"data must be a torch Dataset.*not 3"):
        run_operator(Regressor, {**CONFIG, "train_data": lambda config: 3})
    with pytest.raises(ValueError, match="must contain tensors, not"):
        run_operator(Regressor, {**CONFIG, "train_data": (np.zeros(3), np.zeros(3))})


@pytest.mark.parametrize("operator_cls", OPERATORS, ids=lambda cls: cls.__name__)
def test_the_table_of_an_operator_lists_its_options_with_their_defaults(operator_cls):
    base = operator_cls.__mro__[1]
    inherited = getattr(base, "OPTIONS", {})
    listed = dict(re.findall(r"^ {4}``(\w+)``  +(\S+)", operator_cls.__doc__, re.MULTILINE))
    own = {k: o for k, o in operator_cls.OPTIONS.items() if o is not inherited.get(k)}
    assert set(listed) == set(own)
    for key, option in own.items():
        expected = "required" if option.default is REQUIRED else repr(option.default)
        assert listed[key].replace('"', "'") == expected.replace('"', "'"), key
