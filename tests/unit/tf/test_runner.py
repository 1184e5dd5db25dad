"""What hosts a TensorFlow operator: random numbers, and copies of the state for a restart."""

import json
import random

import numpy as np
import pytest

pytest.importorskip("tensorflow")

from raysgd.context import WorkerContext
from raysgd.elastic.config import ElasticConfig
from raysgd.tf.options import TFOptions
from raysgd.tf.runner import TFRunner
from tests.tf_operators import Digits

RUNNER = TFRunner(TFOptions())


def make_runner(keras, lr=0.1):
    """A runner that takes a snapshot at the begin of each epoch, of 45 steps."""
    config = {"keras": keras, "data": "tf", "shuffle": False, "lr": lr}
    elastic = ElasticConfig(snapshot_every="epoch")
    options = TFOptions(training_operator_cls=Digits, config=config, seed=3, elastic=elastic)
    runner = TFRunner(options)
    runner.setup(WorkerContext(in_driver=True))
    return runner


def arrays_of(state):
    """What models and optimizers hold; names count on in a process."""
    parts = [*state["models"], *state["optimizers"]]
    return [array for part in parts for array in part.values()]


def assert_same(state, other):
    for array, expected in zip(arrays_of(state), arrays_of(other), strict=True):
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("keras", ["keras", "tf_keras"])
def test_from_a_snapshot_training_goes_as_it_went_from_there(keras):
    runner = make_runner(keras)
    runner.train(call=0, until_step=45)
    then = runner.state_dict()
    runner.train(call=1, until_step=50)
    held, now = runner.snapshot(), runner.state_dict()
    assert (held["epoch"], held["global_step"]) == (1, 45)
    assert_same(held, then)
    with pytest.raises(AssertionError):
        assert_same(held, now)
    other = make_runner(keras)
    other.load_state_dict(held)
    other.train(call=1, until_step=50)
    assert_same(other.state_dict(), now)


def draws():
    return random.random(), random.gauss(0, 1), np.random.rand(3).tolist(), np.random.randn(1)[0]


def test_random_states_may_have_become_lists_and_arrays_on_their_way():
    state = RUNNER.rng_state()
    expected = draws()
    kind, keys, *rest = state["numpy"]
    through = json.loads(
        json.dumps({"python": state["python"], "numpy": [kind, keys.tolist(), *rest]})
    )
    RUNNER.set_rng_state(through)
    assert draws() == expected
