"""Fixtures of the unit tests, which do not start Ray."""

import pytest

from raysgd import TorchTrainer
from tests.operators import Classifier

SMALL = {"num_samples": 40, "batch_size": 8}
"""Config for epochs of five batches."""


@pytest.fixture
def make_trainer():
    """A factory of trainers whose only worker is this process, on CPU."""
    made = []

    def make(operator_cls=Classifier, config=None, **arguments):
        trainer = TorchTrainer(
            training_operator_cls=operator_cls,
            config={**SMALL, **(config or {})},
            num_workers=1,
            use_local=True,
            **{"use_gpu": False, **arguments},
        )
        made.append(trainer)
        return trainer

    yield make
    for trainer in made:
        trainer.shutdown()
