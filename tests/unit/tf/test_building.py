"""TensorFlow operators that are built, and how they talk to others."""

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from raysgd._internal.context import WorkerContext  # noqa: E402
from raysgd.tf import TrainingOperator  # noqa: E402
from raysgd.tf.communication import Communication, HorovodGroup, communication_of  # noqa: E402
from tests.tf_operators import Digits, weights  # noqa: E402

PLACE = WorkerContext(world_rank=1, world_size=2, distributed=True)


def test_a_setup_that_registers_nothing_is_told_so(build):
    class Empty(TrainingOperator):
        def setup(self, config):
            pass

    with pytest.raises(RuntimeError, match="did not register anything"):
        build(Empty)


def test_the_seed_decides_what_an_operator_draws(build):
    class Drawing(Digits):
        def setup(self, config):
            self.drawn = tf.random.uniform([3]).numpy().tolist()
            super().setup(config)

    large = 2**40 + 3  # more than TensorFlow's seeds may be
    first, again, other = (build(Drawing, seed=seed) for seed in (large, large, 4))
    assert first.drawn == again.drawn != other.drawn
    np.testing.assert_array_equal(weights(first), weights(again))


def test_the_config_is_given_to_setup_and_kept(build):
    config = {"num_samples": 40, "batch_size": 8}
    operator = build(Digits, config)
    assert operator.config == config
    assert operator._train_state.data.source("train").steps_left(0) == 5


def test_a_worker_alone_talks_to_nobody():
    assert type(communication_of(WorkerContext())) is Communication
    assert type(communication_of(WorkerContext(), use_horovod=True)) is Communication


def test_workers_talk_by_horovod_where_that_was_chosen():
    group = communication_of(PLACE, use_horovod=True)
    assert isinstance(group, HorovodGroup)
    assert (group.size, group.rank) == (2, 1)
