"""Importing raysgd loads only what is needed."""

import pytest

from tests.conftest import run_python

BEGIN = """
import contextlib, importlib, importlib.util, pkgutil, sys

def loaded():
    # ray and its parts, not a library whose name begins with the same letters
    heavy = {"torch", "tensorflow", "keras", "horovod", "ray"}
    return {name.split(".")[0] for name in sys.modules} & heavy

find_spec, asked = importlib.util.find_spec, []
importlib.util.find_spec = lambda name, *rest: (
    None if name in ("tensorflow", "horovod") else find_spec(name, *rest))

class Missing:
    def find_spec(self, name, *rest):
        if name.split(".")[0] in ("tensorflow", "horovod"):
            asked.append(name)
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
"""

LIGHT = """
import raysgd, raysgd.utils, raysgd.data, raysgd.errors, raysgd.testing, raysgd.cli
dir(raysgd)
from raysgd import train
import raysgd.train.backend, raysgd.train.callbacks
for name in train.__all__:
    getattr(train, name)
# A worker must first set the environment variables that TensorFlow reads.
import raysgd.tf, raysgd.comm.horovod
raysgd.TFTrainer
assert not loaded(), loaded()

import logging, os, random, warnings
import numpy, torch

def settings():
    return (dict(os.environ), logging.root.level, list(logging.root.handlers), random.getstate(),
            list(warnings.filters))

before = settings()
import raysgd.operators, raysgd.torch
raysgd.TorchTrainer
assert settings() == before
assert loaded() == {"torch"}, loaded()
assert not {"torchmetrics", "transformers", "mlflow", "tensorboard", "wandb"} & set(sys.modules)

below = {"_internal", "backends", "callbacks", "checkpoint", "comm", "data", "errors", "metrics",
         "operators", "utils"}
names = [info.name for info in pkgutil.walk_packages(raysgd.__path__, "raysgd.")]
names = [name for name in names if name.split(".")[1] in below]
assert {name.split(".")[1] for name in names} == below
for name in names:
    importlib.import_module(name)
assert "ray" not in loaded(), loaded()
assert not asked, asked
"""

TRAIN = """
from raysgd import TorchTrainer, TrainingOperator
from torch.utils.data import DataLoader, TensorDataset

class Operator(TrainingOperator):
    def setup(self, config):
        model = torch.nn.Linear(2, 2)
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            criterion=torch.nn.CrossEntropyLoss(),
        )
        data = TensorDataset(torch.randn(8, 2), torch.zeros(8, dtype=torch.long))
        loader = DataLoader(data, batch_size=4)
        self.register_data(train_loader=loader, validation_loader=loader)

with TorchTrainer(training_operator_cls=Operator, num_workers=1, use_local=True) as trainer:
    assert trainer.train()["num_samples"] == 8
    assert trainer.validate()["num_samples"] == 8
    trainer.load_state_dict(trainer.state_dict())
    with contextlib.suppress(ZeroDivisionError):
        trainer.apply_all_workers(lambda: 1 / 0)
    trainer.train(num_steps=1)
    trainer.get_model()
    trainer.save(sys.argv[1])
    trainer.load(sys.argv[1])

class NoSetup(TrainingOperator):
    def setup(self, config):
        1 / 0

for options in ({"training_operator_cls": NoSetup},
                {"training_operator_cls": Operator, "initialization_hook": lambda: 1 / 0}):
    try:
        TorchTrainer(num_workers=1, use_local=True, **options)
    except ZeroDivisionError:
        pass
    else:
        raise AssertionError(options)
"""

ERRORS = """
import raysgd.train.horovod, raysgd.train.tensorflow
from raysgd.train import Trainer
for make, extra in (
    (lambda: raysgd.TFTrainer(lambda config: None), "raysgd[tensorflow]"),
    (lambda: TorchTrainer(training_operator_cls=Operator, num_workers=2, backend="horovod"),
     "raysgd[horovod]"),
    (lambda: Trainer("tensorflow"), "raysgd[tensorflow]"),
    (lambda: Trainer("horovod"), "raysgd[horovod]"),
    (lambda: raysgd.train.tensorflow.TensorflowTrainer(print), "raysgd[tensorflow]"),
    (lambda: raysgd.train.horovod.HorovodTrainer(print), "raysgd[horovod]"),
):
    try:
        make()
    except ImportError as error:
        assert extra in str(error), error
    else:
        raise AssertionError(extra)
assert loaded() == {"torch"}, loaded()

for info in pkgutil.walk_packages(raysgd.__path__, "raysgd."):
    if not info.name.startswith("raysgd.tf."):
        importlib.import_module(info.name)
assert loaded() == {"torch", "ray"}, loaded()
"""


@pytest.mark.slow("a process of its own that trains, and imports every module")
def test_imports_load_only_what_is_used_and_missing_packages_are_named(tmp_path):
    """A single worker in this process trains without Ray, TensorFlow, and Horovod."""
    code = BEGIN + LIGHT + TRAIN + ERRORS
    run_python("-W", "error", "-c", code, tmp_path / "state.pt")
