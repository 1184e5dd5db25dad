"""Trainers of ready-made operators, in this process."""

import pytest
import torch

from tests.operators import local


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread: with several, such small models are slower, most of all on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def trained():
    """Train an operator for some epochs; return the last training and validation metrics."""

    def train(operator_cls, config, num_epochs, **arguments):
        with local(operator_cls, {"seed": 0, **config}, **arguments) as trainer:
            for _ in range(num_epochs):
                metrics = trainer.train()
            return metrics, trainer.validate()

    return train
