"""``TorchTrainer(exact="bits")`` has the same bits on any number of workers."""

import datetime
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from raysgd import EqualBits, TrainingOperator
from raysgd._internal.context import WorkerContext
from raysgd.errors import CheckpointError
from raysgd.loop.requests import TrainRequest
from raysgd.metrics import merge_workers
from raysgd.torch.options import TorchOptions
from raysgd.torch.runner import TorchRunner
from tests.conftest import assert_names, running_ranks
from tests.unit.torch.bits import CASES, Trains, digest, make_runner

PLAY = """
from tests.unit.torch.bits import play

play(rank, int(sys.argv[2]), dist.TCPStore("127.0.0.1", int(sys.argv[-1])))
"""
SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def results():
    """Return the results of all ranks, by case and number of workers."""
    found = {}
    for size in SIZES:
        with running_ranks(PLAY, size) as store:
            store.set_timeout(datetime.timedelta(seconds=60))
            for name in CASES:
                keys = [f"{name}/{size}/{rank}" for rank in range(size)]
                found[name, size] = [pickle.loads(store.get(key)) for key in keys]
    return found


def merged(results):
    kept = ("train_loss", "val_loss", "val_accuracy", "num_samples")
    metrics = [merge_workers(parts) for parts in zip(*[r[1:] for r in results], strict=True)]
    return [{name: each[name] for name in kept if name in each} for each in metrics]


@pytest.mark.parametrize("name", CASES)
def test_all_numbers_of_workers_have_the_same_bits(results, name):
    states = {state for size in SIZES for state, *_ in results[name, size]}
    assert len(states) == 1
    assert len({digest(merged(results[name, size])) for size in SIZES}) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"exact": "bit"}, ["exact", "'bit'", "bits"]),
        ({"exact": "bits", "wrap_ddp": False}, ["wrap_ddp=False"]),
        ({"exact": "bits", "add_dist_sampler": False}, ["add_dist_sampler=False"]),
        ({"exact": "bits", "use_fp16": "apex"}, ["apex"]),
        ({"exact": EqualBits(2), "num_workers": 3}, ["num_workers=3", "num_shards=2"]),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        TorchOptions(training_operator_cls=Trains, use_gpu=False, **arguments)
    assert_names(caught.value, words)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(2), torch.zeros(1))] * 8)


def own_step(operator, batch):
    operator.backward(operator.model(batch[0]).mean())
    operator.optimizer.step()


def steps_before_a_loss(operator, batch):
    for _ in range(2):
        operator.backward(operator.model(batch[0]).mean())
        operator.optimizer_step(operator.optimizer)


def sparse(operator, batch):
    operator.backward(operator.model.table(torch.tensor([0])).sum())
    operator.optimizer_step(operator.optimizer)


class Refused(TrainingOperator):
    def setup(self, config):
        model = torch.nn.Linear(2, 1)
        if config["train_batch"] is sparse:
            model.table = torch.nn.Embedding(3, 2, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.model, self.optimizer = self.register(
            models=model, optimizers=optimizer, sharding=config["sharding"]
        )
        self.register_data(train_loader=config["loader"])

    def train_batch(self, batch, batch_info):
        self.config["train_batch"](self, batch)
        return {}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sharding": "optimizer"}, ["sharding='optimizer'", "exact"]),
        ({"loader": DataLoader(Stream(), 4)}, ["train_loader", "exact", "map-style"]),
        ({"train_batch": own_step}, ["optimizer.step()", "self.optimizer_step"]),
        ({"train_batch": steps_before_a_loss}, ["after it has stepped", "exact"]),
        ({"train_batch": sparse}, ["SGD", "sparse=False"]),
    ],
)
def test_operators_that_do_not_fit_are_refused(settings, words):
    loader = DataLoader(TensorDataset(torch.zeros(8, 2), torch.zeros(8, 1)), 4)
    config = {"sharding": None, "train_batch": own_step, "loader": loader, **settings}
    options = TorchOptions(
        training_operator_cls=Refused, config=config, use_gpu=False, exact=EqualBits(2)
    )
    runner = TorchRunner(options)
    with pytest.raises((ValueError, RuntimeError)) as caught:  # noqa: PT012
        runner.setup(WorkerContext(in_driver=True))
        runner.handle(TrainRequest(call=0, until_epoch=1))
    assert_names(caught.value, words)


def test_state_of_another_number_of_shards_is_refused():
    runner = make_runner("perceptron", 0, 1)
    runner.setup(WorkerContext(in_driver=True))
    state = {**runner._train_state.training_state(), "num_shards": 8}
    with pytest.raises(CheckpointError) as caught:
        runner._train_state.check_training_state(state)
    assert_names(caught.value, ["8 shards", "6", "EqualBits(num_shards=8)"])
