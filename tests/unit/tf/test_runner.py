"""The runner of a Keras operator: random numbers, copies of the state, and failed steps."""

import json
import random
from functools import partial

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

from raysgd._internal.context import WorkerContext  # noqa: E402
from raysgd.elastic.config import ElasticConfig  # noqa: E402
from raysgd.loop.requests import TrainRequest  # noqa: E402
from raysgd.tf import TrainingOperator  # noqa: E402
from raysgd.tf.options import TFOptions  # noqa: E402
from raysgd.tf.runner import TFRunner  # noqa: E402
from tests.tf_operators import Digits, digits, make_model  # noqa: E402

RUNNER = TFRunner(TFOptions())


def make_runner(lr=0.1):
    """Return a runner that takes a snapshot at the start of each epoch. An epoch has 45 steps."""
    config = {"data": "tf", "shuffle": False, "lr": lr}
    elastic = ElasticConfig(snapshot_every="epoch")
    options = TFOptions(training_operator_cls=Digits, config=config, seed=3, elastic=elastic)
    runner = TFRunner(options)
    runner.setup(WorkerContext(in_driver=True))
    runner.operator._train_state.settings.context = WorkerContext()  # takes snapshots
    return runner


def arrays_of(state):
    """Return the arrays of models and optimizers. Keras numbers their names within a process."""
    parts = [*state["models"], *state["optimizers"]]
    return [array for part in parts for array in part.values()]


def assert_same(state, other):
    for array, expected in zip(arrays_of(state), arrays_of(other), strict=True):
        np.testing.assert_array_equal(array, expected)


def test_training_continues_equally_from_a_snapshot():
    runner = make_runner()
    runner.handle(TrainRequest(call=0, until_step=45))
    then = runner.state_dict()
    runner.handle(TrainRequest(call=1, until_step=50))
    held, now = runner.snapshot(), runner.state_dict()
    assert (held["epoch"], held["global_step"]) == (1, 45)
    assert_same(held, then)
    with pytest.raises(AssertionError):
        assert_same(held, now)
    other = make_runner()
    other.load_state_dict(held)
    other.handle(TrainRequest(call=1, until_step=50))
    assert_same(other.state_dict(), now)


def draws():
    return random.random(), random.gauss(0, 1), np.random.rand(3).tolist(), np.random.randn(1)[0]


def test_generators_load_states_that_were_stored_as_json():
    state = RUNNER.generators.state()
    expected = draws()
    kind, keys, *rest = state["numpy"]
    through = json.loads(
        json.dumps({"python": state["python"], "numpy": [kind, keys.tolist(), *rest]})
    )
    RUNNER.generators.set(through)
    assert draws() == expected


class TwoOptimizers(TrainingOperator):
    """Updates two models in each step. It can fail once, between the updates."""

    def setup(self, config):
        self.models, self.optimizers, self.criterion = self.register(
            [make_model() for _ in range(2)],
            [keras.optimizers.Adam(0.01) for _ in range(2)],
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        self.losses = [partial(self.loss_of, model) for model in self.models]
        self.register_data(train_loader=digits()[0], shuffle=False)

    def loss_of(self, model, images, labels):
        return self.criterion(labels, model(images, training=True))

    def train_batch(self, batch, batch_info):
        for place, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            if place and batch_info["global_step"] == self.config.get("fail_at"):
                raise ValueError(f"bad batch {self.config.pop('fail_at')}")
            loss = self.minimize(self.losses[place], *batch, optimizer=optimizer, model=model)
        return {"train_loss": loss}


def test_a_failed_step_restores_the_first_of_two_optimizers():
    runners = []
    for config in ({}, {"fail_at": 2}):
        options = TFOptions(training_operator_cls=TwoOptimizers, config=config, seed=3)
        runners.append(TFRunner(options))
        runners[-1].setup(WorkerContext(in_driver=True))
    undisturbed, failing = runners
    undisturbed.handle(TrainRequest(call=0, until_step=4))
    with pytest.raises(ValueError, match="bad batch 2"):
        failing.handle(TrainRequest(call=0, until_step=4))
    failing.handle(TrainRequest(call=0, until_step=4))
    assert_same(failing.state_dict(), undisturbed.state_dict())
