"""What importing costs, and what it does not do. Each check has a process of its own."""

import json
import subprocess
import sys

import pytest

HEAVY = ["torch", "tensorflow", "keras", "horovod", "ray"]

TRAIN = """
import sys
import torch
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
    try:
        trainer.apply_all_workers(lambda: 1 / 0)
    except ZeroDivisionError:
        pass
    trainer.train(num_steps=1)
    trainer.get_model()
    trainer.save(sys.argv[1])
    trainer.load(sys.argv[1])
"""

# ray and its parts, not a library whose name begins with the same letters
LOADED = (
    "import json, sys; "
    "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules} & set(HEAVY))))"
)


def loaded_by(code, *arguments):
    """Run code in a fresh process; return which of the heavy packages it imported."""
    program = f"HEAVY = {HEAVY!r}\n{code}\n{LOADED}"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_raysgd_imports_no_framework():
    """Also what users of its small homes import, and what a look at its names does."""
    code = "import raysgd, raysgd.utils, raysgd.data, raysgd.errors, raysgd.testing; dir(raysgd)"
    assert loaded_by(code) == []


def test_the_layers_below_cluster_and_the_operators_import_without_ray():
    code = """
import importlib, pkgutil, raysgd
below = ("backends", "callbacks", "checkpoint", "comm", "config", "context", "data", "elastic",
         "errors", "mergeable", "metrics", "operators", "report", "run_log", "timers", "trees",
         "utils")
names = [info.name for info in pkgutil.walk_packages(raysgd.__path__, "raysgd.")]
names = [name for name in names if name.split(".")[1] in below]
assert {name.split(".")[1] for name in names} == set(below)
for name in names:
    importlib.import_module(name)
"""
    assert "ray" not in loaded_by(code)


def test_importing_the_torch_family_imports_neither_ray_nor_another_framework():
    assert loaded_by("import raysgd.torch, raysgd.testing; raysgd.TorchTrainer") == ["torch"]


def test_importing_the_function_family_imports_neither_ray_nor_a_framework():
    code = """
from raysgd import train
import raysgd.train.backend, raysgd.train.callbacks
for name in train.__all__:
    getattr(train, name)
"""
    assert loaded_by(code) == []


def test_importing_the_tensorflow_family_imports_no_framework():
    """So that a worker can set what TensorFlow reads in the environment first."""
    assert loaded_by("import raysgd.tf, raysgd.comm.horovod; raysgd.TFTrainer") == []


WITHOUT = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: (
    None if name in ("tensorflow", "horovod") else find_spec(name, *rest))
class Missing:
    def find_spec(self, name, *rest):
        if name.split(".")[0] in ("tensorflow", "horovod"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
"""


def test_without_tensorflow_and_horovod_the_rest_works_and_errors_name_the_extra(tmp_path):
    code = (
        WITHOUT
        + TRAIN
        + """
import raysgd, raysgd.train.horovod, raysgd.train.tensorflow
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
"""
    )
    assert loaded_by(code, str(tmp_path / "state.pt")) == ["torch"]


def test_without_tensorflow_and_horovod_every_module_can_be_imported():
    code = """
import importlib, pkgutil, raysgd
names = [info.name for info in pkgutil.walk_packages(raysgd.__path__, "raysgd.")]
for name in names:
    if not name.startswith("raysgd.tf."):
        importlib.import_module(name)
"""
    assert loaded_by(WITHOUT + code) == ["ray", "torch"]


def test_the_operators_import_their_optional_packages_only_where_these_are_used():
    code = """
import sys
import raysgd.operators as operators
assert "torch" not in sys.modules
for name in operators.__all__:
    getattr(operators, name)
assert not {"torchmetrics", "transformers"} & set(sys.modules)
"""
    assert loaded_by(code) == ["torch"]


def test_one_local_worker_trains_without_ray(tmp_path):
    assert loaded_by(TRAIN, str(tmp_path / "state.pt")) == ["torch"]


@pytest.mark.parametrize("name", ["raysgd", "raysgd.tf", "raysgd.torch"])
def test_importing_changes_neither_the_environment_nor_logging(name):
    code = f"""
import logging, os, random, warnings
import numpy
if {name!r} != "raysgd":
    import torch
before = (dict(os.environ), logging.root.level, list(logging.root.handlers), random.getstate(),
          list(warnings.filters))
import {name}
assert before == (dict(os.environ), logging.root.level, list(logging.root.handlers),
                  random.getstate(), list(warnings.filters))
"""
    loaded_by(code)
