"""Settings and fixtures of the unit tests, none of which starts Ray."""

import pytest
from hypothesis import HealthCheck, settings

from raysgd import TorchTrainer
from tests.operators import Classifier

settings.register_profile(
    "unit",
    max_examples=40,
    deadline=None,
    # the fixtures that properties use here are factories: one example leaves nothing to the next
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("unit")

SMALL = {"num_samples": 40, "batch_size": 8}
"""Config of an epoch of five batches."""


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
