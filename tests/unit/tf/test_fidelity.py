"""Fewer workers than configured make the same updates as one process, also in micro-batches."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("tensorflow")

from raysgd._internal.runner import WorkerContext
from raysgd.loop.requests import TrainRequest
from raysgd.tf.communication import KerasCollectives
from raysgd.tf.losses import BatchLosses, _multiply_weights
from raysgd.tf.options import KerasOptions
from raysgd.tf.runner import KerasRunner
from tests.fidelity import Meeting
from tests.tf_operators import Digits


@pytest.fixture(autouse=True)
def double_precision():
    config = pytest.importorskip("keras").config
    config.set_floatx("float64")
    config.set_dtype_policy("float64")
    yield
    config.set_floatx("float32")
    config.set_dtype_policy("float32")


class Averages(KerasCollectives):
    """Exchanges values with workers that are threads."""

    def __init__(self, size, rank, meeting):
        super().__init__(size, rank)
        self.meeting = meeting

    def all_reduce_mean(self, tensors):
        of_all = zip(*self.meeting.gather(self.rank, tensors), strict=True)
        return [sum(each) / self.size for each in of_all]

    def all_reduce_min(self, *values):
        return [min(each) for each in zip(*self.meeting.gather(self.rank, values), strict=True)]


class Watched(Digits):
    """Records the sizes of its batches. ``updates`` in the config sets the updates per batch."""

    sizes = ()

    def train_batch(self, batch, batch_info):
        self.sizes = (*self.sizes, len(batch[-1]))
        for _ in range(self.config.get("updates", 1) - 1):
            super().train_batch(batch, batch_info)
        return super().train_batch(batch, batch_info)


def trained(num_workers, size, batch_size, **config):
    """Train two epochs on `size` of `num_workers` workers; return arrays, step, and batch sizes."""
    config = {
        "shuffle": False,
        "optimizer": "Adam",
        "num_samples": 100,
        "batch_size": batch_size,
        **config,
    }
    meeting, runners = Meeting(size), []
    for rank in range(size):
        options = KerasOptions(
            training_operator_cls=Watched, config=config, num_workers=num_workers, seed=3
        )
        runners.append(KerasRunner(options))
        runners[-1].setup(WorkerContext(is_in_driver=True))
        train_state = runners[-1].operator._train_state
        train_state.begin_generation(
            WorkerContext(world_rank=rank, world_size=size, is_in_driver=True)
        )
        train_state.collectives = Averages(size, rank, meeting)
    with ThreadPoolExecutor(size) as pool:
        request = TrainRequest(call_number=0, until_epoch=2)
        results = list(pool.map(lambda runner: runner.handle(request), runners))
    assert {result["batch_count"] for result in results} == {8}
    state = runners[0].state_dict()
    arrays = [array.ravel() for part in state["models"] for array in part.values()]
    sizes = [runner.operator.sizes for runner in runners]
    return np.concatenate(arrays), state["global_step"], sizes


@pytest.mark.parametrize("data", ["tf", "arrays"])
@pytest.mark.parametrize("size", [1, 2])
def test_fewer_workers_make_the_updates_of_one_process_in_parts(data, size):
    """A step has 33 samples. The last step of an epoch has one, which all workers get."""
    expected, num_steps, _ = trained(1, 1, 33, data=data)
    found, steps, sizes = trained(3, size, 11, data=data)
    assert steps == num_steps == 8
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert max(max(each) for each in sizes) <= 11


def test_two_updates_per_step_need_whole_batches(caplog):
    expected, _, _ = trained(1, 1, 33, data="arrays", updates=2)
    found, _, sizes = trained(3, 1, 11, data="arrays", updates=2)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert sizes == [(11, *[33, 33, 33, 1] * 2)]
    assert "train_batch calls self.minimize() several times" in caplog.text


def test_losses_and_class_weights_have_the_precision_of_keras():
    model = pytest.importorskip("keras").Model()
    criterion = BatchLosses(model, "mae", None, {}).criterion
    assert float(criterion(np.zeros((1, 1)), np.full((1, 1), 0.1))) == 0.1
    assert _multiply_weights({0: 0.1}, np.zeros(1), None) == [0.1]
