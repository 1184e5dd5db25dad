"""The Python calls of a training step beyond those of a loop by hand. No noise changes them."""

import collections
import gc
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import raysgd
from raysgd import BadSteps, TorchTrainer, TrainingOperator
from tests.operators import register_with_sgd

MOST = 110
"""Calls of a step beyond those of a loop by hand. The difference was -13 on one machine and 15 on
another: both sides call PyTorch, whose own calls depend on its version and on the machine."""
OWN = 290
"""Calls of a step that files of raysgd make and receive: 262."""
MOST_OF_BAD_STEPS = 25
"""Calls of a step that looks for bad steps, beyond those of another step."""
LIBRARY = f"{Path(raysgd.__file__).parent}/"


class Perceptron(TrainingOperator):
    def setup(self, config):
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        data = torch.randn(2560, 8)
        register_with_sgd(self, model, lr=0.01, momentum=0.9, criterion=nn.MSELoss())
        data = TensorDataset(data, data.sum(1, keepdim=True))
        self.register_data(train_loader=DataLoader(data, batch_size=32, shuffle=True))


def train_by_hand(operator, num_steps):
    total, loader = 0.0, operator.train_loader.loader
    for (features, target), _ in zip(loader, range(num_steps), strict=False):
        operator.optimizer.zero_grad()
        loss = operator.criterion(operator.model(features), target)
        loss.backward()
        operator.optimizer.step()
        total += loss.item()


@pytest.fixture
def files():
    """The file of each call since the start of the test, in this thread and in new ones."""
    made = []

    def note(frame, event, argument):
        if event in ("call", "c_call"):
            made.append(frame.f_code.co_filename)

    gc.disable()
    threading.setprofile(note)
    sys.setprofile(note)
    yield made
    sys.setprofile(None)
    threading.setprofile(None)
    gc.enable()


def calls_per_step(files, train):
    calls = []
    for num_steps in (10, 30):
        files.clear()
        train(num_steps)
        calls.append(collections.Counter(files))
    calls[1].subtract(calls[0])
    return {file: count / 20 for file, count in calls[1].items()}


def calls_of_trainer(files, **arguments):
    """Return the calls of a step, by file, and the operator."""
    arguments |= {"training_operator_cls": Perceptron, "use_local": True, "use_gpu": False}
    with TorchTrainer(**arguments) as trainer:
        trainer.train(num_steps=2)
        found = calls_per_step(files, lambda num_steps: trainer.train(num_steps=num_steps))
        return found, trainer.get_local_operator()


def test_looking_for_bad_steps_makes_few_calls(files):
    plain, _ = calls_of_trainer(files)
    looking, _ = calls_of_trainer(files, bad_steps=BadSteps(spike=1000.0))
    assert sum(looking.values()) - sum(plain.values()) <= MOST_OF_BAD_STEPS


def test_step_makes_few_calls_more_than_a_loop_by_hand(files):
    found, operator = calls_of_trainer(files)
    by_hand = calls_per_step(files, lambda num_steps: train_by_hand(operator, num_steps))
    differences = {file: found[file] - by_hand.get(file, 0) for file in sorted(found)}
    own = sum(number for file, number in found.items() if file.startswith(LIBRARY))
    more = sum(found.values()) - sum(by_hand.values())
    message = (
        f"A step makes {own:.0f} calls in raysgd, and {more:.0f} more than by hand: "
        + ", ".join(f"{file.split('/', 3)[-1]} {n:+.0f}" for file, n in differences.items() if n)
    )
    assert own <= OWN, message
    assert more <= MOST, message
