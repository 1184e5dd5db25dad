"""``TorchTrainer(exact="bits")`` has the same bits on any number of workers."""

import itertools
import os
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from raysgd import ElasticConfig, EqualBits, TrainingOperator
from raysgd._internal.runner import WorkerContext
from raysgd.data.partition import StepLayout
from raysgd.errors import CheckpointError
from raysgd.loop.requests import TrainRequest
from raysgd.metrics import merge_worker_metrics
from raysgd.torch.input.loader_copies import SeededSamples, with_dataset
from raysgd.torch.input.sources import MapStyleSource
from raysgd.torch.options import TorchOptions
from raysgd.torch.runner import TorchRunner
from raysgd.torch.strategies.equal_bits import all_gather_metrics
from tests.conftest import assert_names
from tests.unit.torch.bits import CASES, Augmented, Case, Trains, digest, merged
from tests.unit.torch.cases import FLOAT16

SIZES = (1, 2, 4)


@pytest.mark.parametrize("name", CASES)
def test_all_numbers_of_workers_have_the_same_bits(workers, name):
    results = [workers(replace(CASES[name], num_workers=size)) for size in SIZES]
    assert len({state for of_size in results for state, *_ in of_size}) == 1
    assert len({digest(merged(of_size)) for of_size in results}) == 1


class Normed(TrainingOperator):
    def setup(self, config):
        layers = torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1)
        model = torch.nn.Sequential(*layers)
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            criterion=torch.nn.MSELoss(),
            gradient_accumulation_steps=2,
        )
        x = torch.arange(32.0).reshape(16, 2)
        self.register_data(train_loader=DataLoader(TensorDataset(x, torch.zeros(16, 1)), 4))


def test_running_statistics_change_by_the_mean_of_all_logical_workers():
    """Kernels of batch normalization do not count the versions of the statistics."""
    runner = Case(num_workers=1, num_logical_workers=2, operator_cls=Normed).make_runner()
    runner.setup(WorkerContext(is_in_driver=True))
    runner.handle(TrainRequest(call_number=0, until_epoch=1))
    norm, plain = runner.operator.model[0], torch.nn.BatchNorm1d(2)
    for parts in torch.arange(32.0).reshape(2, 2, 4, 2):
        plain(parts.mean(0))  # has the mean of both
    torch.testing.assert_close(norm.running_mean, plain.running_mean)
    assert norm.num_batches_tracked == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"exact": "bit"}, ["exact", "'bit'", "bits"]),
        ({"exact": "bits", "wrap_ddp": False}, ["wrap_ddp=False"]),
        ({"exact": "bits", "add_dist_sampler": False}, ["add_dist_sampler=False"]),
        ({"exact": "bits", "use_fp16": "apex"}, ["apex"]),
        ({"exact": EqualBits(2), "num_workers": 3}, ["num_workers=3", "num_logical_workers=2"]),
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


def data_after_step(operator, batch):
    operator.backward(operator.model(batch[0]).mean())
    operator.optimizer_step(operator.optimizer)
    mean = operator.model[0].running_mean
    mean.data = mean + 1  # PyTorch does not count it as a version


def steps_before_a_loss(operator, batch):
    for _ in range(2):
        operator.backward(operator.model(batch[0]).mean())
        operator.optimizer_step(operator.optimizer)


def sparse(operator, batch):
    operator.backward(operator.model.table(torch.tensor([0])).sum())
    operator.optimizer_step(operator.optimizer)


def clipped(operator, batch):
    operator.backward(operator.model(batch[0]).mean())
    torch.nn.utils.clip_grad_norm_(operator.model.parameters(), 0.1)
    operator.optimizer_step(operator.optimizer)


def skipped(operator, batch):
    if batch[0].sum() < 60:
        operator.backward(operator.model(batch[0]).mean())
        operator.optimizer_step(operator.optimizer)


def with_sparse_buffer():
    model = torch.nn.Linear(2, 1)
    model.register_buffer("graph", torch.eye(2).to_sparse())
    return model


def forward_after_step(operator, batch):
    operator.backward(operator.model(batch[0]).mean())
    operator.optimizer_step(operator.optimizer)
    operator.model(batch[0])


class Noise(Dataset):
    """Its samples are random numbers. Its ``__getitems__`` does not know pairs of indices."""

    def __getitem__(self, index):
        return index + self.scale * torch.rand(())

    def __getitems__(self, indices):
        raise TypeError


def set_scale(process):
    torch.utils.data.get_worker_info().dataset.scale = 2.0


class Refused(TrainingOperator):
    def setup(self, config):
        model = torch.nn.Linear(2, 1)
        if config["model"] is not None:
            model = torch.nn.Sequential(config["model"](), model)
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
        ({"sharding": "optimizer"}, ['sharding="optimizer"', "exact"]),
        ({"loader": DataLoader(Stream(), 4)}, ["train_loader", "exact", "map-style"]),
        ({"train_batch": own_step}, ["optimizer.step()", "self.optimizer_step"]),
        ({"train_batch": steps_before_a_loss}, ["after it has stepped", "exact"]),
        ({"train_batch": sparse}, ["SGD", "sparse=False"]),
        ({"train_batch": clipped, "num_logical_workers": 1}, ["changes gradients", "exact"]),
        ({"train_batch": skipped}, ["exact", "step 0", "self.optimizer_step"]),
        *(
            (
                {"train_batch": changing, "model": partial(torch.nn.BatchNorm1d, 2)},
                ["exact", "buffers", "self.optimizer_step"],
            )
            for changing in (forward_after_step, data_after_step)
        ),
        ({"model": partial(torch.nn.SyncBatchNorm, 2)}, ["exact", "SyncBatchNorm"]),
        ({"model": partial(torch.nn.Embedding, 2, 2, max_norm=1.0)}, ["exact", "max_norm"]),
        ({"model": with_sparse_buffer}, ["exact", "Linear", "sparse buffers", "to_dense"]),
        ({"model": partial(torch.nn.LazyLinear, 2)}, ["exact", "LazyLinear", "uninitialized"]),
    ],
)
def test_operators_that_do_not_fit_are_refused(settings, words):
    x = torch.arange(32.0).reshape(16, 2)
    loader = DataLoader(TensorDataset(x, torch.zeros(16, 1)), 4)
    usual = {"sharding": None, "train_batch": own_step, "loader": loader, "model": None}
    config = {**usual, "num_logical_workers": 2, **settings}
    options = TorchOptions(
        training_operator_cls=Refused,
        config=config,
        use_gpu=False,
        exact=EqualBits(config["num_logical_workers"]),
    )
    runner = TorchRunner(options)
    with pytest.raises((ValueError, RuntimeError)) as caught:  # noqa: PT012
        runner.setup(WorkerContext(is_in_driver=True))
        runner.handle(TrainRequest(call_number=0, until_epoch=1))
    assert_names(caught.value, words)


class Skips(Trains):
    def train_batch(self, batch, batch_info):
        if self.world_rank == 0 or batch_info["global_step"] < 2:
            return super().train_batch(batch, batch_info)
        return {}


class Differing(Case):
    def run(self, rank):
        runner = self.start(rank)
        with pytest.raises(
            RuntimeError, match=r"all logical workers in step 2: .* only for some of them"
        ):
            runner.handle(TrainRequest(call_number=0, until_step=3))
        exchange = runner._train_state.exchange
        exchange.begin_generation()
        torch.set_num_threads(1 + rank)
        with pytest.raises(RuntimeError, match=r"one kind, .* has (?!model name).* 1 threads"):
            exchange.begin_generation()
        torch.set_num_threads(1)


def test_workers_that_differ_are_refused(workers):
    workers(Differing(operator_cls=Skips, num_logical_workers=2))


def test_wrappers_of_user_code_are_refused(process_group):
    """They would average the gradients of each logical worker."""

    class Wraps(Trains):
        def setup(self, config):
            super().setup(config)
            self.model = torch.nn.parallel.DistributedDataParallel(self.model)

    runner = Case(operator_cls=Wraps, num_logical_workers=2).make_runner()
    with pytest.raises(ValueError, match=r"does not work with DistributedDataParallel\(model\)"):
        runner.setup(WorkerContext(has_process_group=True))


def test_random_numbers_of_a_data_set_follow_the_position_in_the_epoch():
    batches = [[((1, 2, position), 5) for position in (3, 4, 3)]]
    own = DataLoader(Noise(), batch_sampler=batches, num_workers=1, worker_init_fn=set_scale)
    ((first, second, again),) = with_dataset(own, SeededSamples(own.dataset))
    assert first == again != second


def test_kept_loader_processes_use_a_new_seed():
    loader = DataLoader(Augmented(8, False), 4, num_workers=1, persistent_workers=True)
    layout = StepLayout(1, "a test", seeds_parts=True)
    sizes = {"training": True, "world_size": 1, "rank": 0, "layout": layout}
    source, fresh = (MapStyleSource(loader, seed=seed, **sizes) for seed in (1, 2))
    batches = list(source.batches(0, 0))
    source.reseed(2)
    again, expected = list(source.batches(0, 0)), list(fresh.batches(0, 0))
    source.end_processes()
    fresh.end_processes()
    assert digest(again) == digest(expected) != digest(batches)


def test_a_local_worker_restores_the_settings_of_the_process(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    found = []
    runner = Case(num_workers=1).make_runner()
    for step in (None, runner.prepare, runner.prepare, lambda context: runner.teardown()):
        if step is not None:
            step(WorkerContext(is_in_driver=True, num_cpus=torch.get_num_threads() + 1))
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
        found.append((is_deterministic, workspace, torch.get_num_threads()))
    assert [is_deterministic for is_deterministic, *_ in found] == [False, True, True, False]
    assert [workspace for _, workspace, _ in found] == [None, ":4096:8", ":4096:8", None]
    assert found[0] == found[3] != found[1]


class Exchanging(Case):
    def run(self, rank):
        registered = self.start(rank)._train_state
        for size in (0, 300, 5000, 10):
            texts = [str(3 * rank + i) * size * (1 + rank) for i in range(3)]
            shared = all_gather_metrics(registered, [({"text": t}, 2.0, False) for t in texts])
            expected = [str(i) * size * (1 + i // 3) for i in range(6)]
            assert [text["text"] for text, *_ in shared] == expected


def test_metrics_of_any_size_are_exchanged(workers):
    workers(Exchanging())


class Stops(Trains):
    def train_epoch(self, iterator, info):
        partition = self._train_state.data.source("train").partition
        two_steps = itertools.islice(iterator, 2 * len(partition.logical_workers))
        metrics = super().train_epoch(two_steps, info)
        num_samples = 2 * partition.global_batch_size
        assert (metrics["num_samples"], metrics["batch_count"]) == (num_samples, 2)
        return metrics


def test_a_loop_that_stops_early_has_the_metrics_of_all_workers(workers):
    workers(Case(operator_cls=Stops, num_epochs=1))


class Fails(Trains):
    fails_at = 2

    def train_batch(self, batch, batch_info):
        result = super().train_batch(batch, batch_info)
        if self._train_state.update.optimizer_steps.counts:
            self.scheduler.step()
            if self.global_step == self.fails_at:
                self.fails_at = None
                raise ValueError("fails once")
        return result


class Succeeds(Fails):
    fails_at = None


def test_after_a_failure_the_worker_and_its_replacement_have_the_same_bits_and_metrics():
    elastic, request = ElasticConfig(snapshot_every=1), TrainRequest(call_number=0, until_epoch=1)
    fails, resumed, expected = (
        Case(num_workers=1, operator_cls=each, settings=FLOAT16).make_runner(elastic=elastic)
        for each in (Fails, Succeeds, Succeeds)
    )
    for runner in (fails, resumed, expected):
        runner.setup(WorkerContext())
    with pytest.raises(ValueError, match="fails once"):
        fails.handle(request)
    resumed.load_state_dict(fails.acquire_snapshot())
    results = [
        digest(
            [merge_worker_metrics([each.handle(request)]), each._hosted_loop.state_access.read()]
        )
        for each in (fails, resumed, expected)
    ]
    assert len(set(results)) == 1


def test_state_of_another_number_of_logical_workers_is_refused():
    runner = Case(num_workers=1).make_runner()
    runner.setup(WorkerContext(is_in_driver=True))
    state_access = runner._hosted_loop.state_access
    state = {**state_access.read(), "num_logical_workers": 8}
    with pytest.raises(CheckpointError) as caught:
        state_access.check(state)
    assert_names(caught.value, ["8 logical workers", "6", "EqualBits(num_logical_workers=8)"])
