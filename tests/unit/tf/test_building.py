"""TensorFlow operators that are built, and how they talk to others."""

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from raysgd._internal.context import WorkerContext  # noqa: E402
from raysgd.tf import TrainingOperator  # noqa: E402
from raysgd.tf.communication import HorovodGroup, communication_of  # noqa: E402
from tests.tf_operators import Digits, weights  # noqa: E402

PLACE = WorkerContext(world_rank=1, world_size=2, distributed=True)


def test_a_setup_without_register_is_an_error(build):
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


def test_workers_talk_by_horovod_where_that_was_chosen():
    group = communication_of(PLACE, use_horovod=True)
    assert isinstance(group, HorovodGroup)
    assert (group.size, group.rank) == (2, 1)
