"""Fixtures of the unit tests, which do not start Ray."""

import pytest

from tests.operators import Classifier, local

SMALL = {"num_samples": 40, "batch_size": 8}
"""Config for epochs of five batches."""


@pytest.fixture
def make_trainer():
    """A factory of trainers whose only worker is this process, on CPU."""
    made = []

    def make(operator_cls=Classifier, config=None, **arguments):
        made.append(local(operator_cls, {**SMALL, **(config or {})}, num_workers=1, **arguments))
        return made[-1]

    yield make
    for trainer in made:
        trainer.shutdown()
