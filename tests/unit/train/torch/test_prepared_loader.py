"""Loaders of training functions: each worker gets its part of the data."""

import itertools
import random
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from raysgd.train.torch.prepared_loader import PreparedLoader
from tests.operators import Streamed, on_gpu


def loader(num=20, **arguments):
    return DataLoader(TensorDataset(torch.arange(num)), batch_size=4, **arguments)


def prepared(loader, rank=0, size=2, **others):
    given = {"device": torch.device("cpu"), "prefetch": True, "seed": 0, **others}
    return PreparedLoader(loader, world_size=size, rank=rank, **given)


def rows(loader):
    return [row for (batch,) in loader for row in batch.tolist()]


def parts_of(make, size=2):
    """Return the rows of each worker; `make` makes its loader."""
    parts = []
    for rank in range(size):
        random.seed(rank)  # workers differ in their own random numbers
        torch.manual_seed(rank)
        parts.append(rows(prepared(make(), rank, size)))
    return parts


@pytest.mark.parametrize("shuffled", [True, False])
def test_passes_count_from_the_epoch_that_the_user_sets(shuffled):
    def make():
        sampler = None if shuffled else SubsetRandomSampler(range(20))
        return prepared(loader(shuffle=shuffled, sampler=sampler))

    begun, resumed = make(), make()
    passes = [rows(begun) for _ in range(5)]
    assert isinstance(resumed.sampler, DistributedSampler)  # scripts check this before set_epoch()
    resumed.sampler.set_epoch(3)
    assert [rows(resumed), rows(resumed)] == passes[3:]
    begun.sampler.set_epoch(2)  # the epoch that an automatic count also reaches
    assert [rows(begun), rows(begun)] == passes[2:4]


class OwnSampler:
    """Draws from the global random numbers, or depends on its epoch."""

    def __init__(self, epoch=None):
        self.epoch = epoch

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 8

    def __iter__(self):
        if self.epoch is None:
            return iter(random.sample(range(8), 8))
        return iter(range(self.epoch, self.epoch + 8))


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_loader_of_one_worker_takes_an_epoch(shuffle):
    one = prepared(loader(shuffle=shuffle), size=1)
    orders = []
    for epoch in (0, 1, 0):
        one.sampler.set_epoch(epoch)
        orders.append(rows(one))
    assert orders[0] == orders[2]
    assert (orders[0] != orders[1]) == shuffle
    assert sorted(orders[1]) == list(range(20))


def test_the_users_own_sampler_follows_the_epoch_and_may_set_it():
    sampler = OwnSampler(epoch=2)
    worker = prepared(loader(sampler=sampler))
    assert [rows(worker)[0], rows(worker)[0]] == [2, 3]
    sampler.set_epoch(3)
    assert [rows(worker)[0], rows(worker)[0]] == [3, 4]
    worker.sampler.set_epoch(7)
    assert [rows(worker)[0], rows(worker)[0]] == [7, 8]
    parts = parts_of(lambda: loader(sampler=OwnSampler()))  # of the same random numbers
    assert sorted(parts[0] + parts[1]) == list(range(8))


@pytest.mark.parametrize(
    ("sampler", "parts"),
    [
        (SequentialSampler(range(5)), [[0, 1, 2], [3, 4]]),
        ([7, 3], [[7], [3], [7], [3], [7]]),
        ([], [[], []]),
    ],
)
def test_samplers_keep_what_they_select(sampler, parts):
    assert parts_of(lambda: loader(sampler=sampler), size=len(parts)) == parts


def test_the_samplers_of_a_prepared_loader_yield_the_indices_of_the_worker():
    worker = prepared(loader())
    part = rows(worker)
    assert list(worker.sampler) == list(itertools.chain(*worker.batch_sampler)) == part
    assert len(worker.sampler) == len(part)
    assert len(worker.batch_sampler) == len(worker)


class PartSampler:
    num_replicas, rank = 2, 1

    def __len__(self):
        return 2

    def __iter__(self):
        return iter([1, 3])


DATA = TensorDataset(torch.arange(20))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (DataLoader(Streamed([(n,) for n in range(4)]), batch_size=2), [0, 1, 2, 3]),
        (DataLoader(DATA, batch_sampler=BatchSampler(range(19, -1, -1), 8, False)), range(20)),
        (DataLoader(DATA, batch_size=4, sampler=PartSampler()), [1, 3]),
        (
            DataLoader(DATA, batch_size=None, sampler=BatchSampler(PartSampler(), 1, False)),
            [1, 3],
        ),
    ],
)
def test_loaders_that_select_their_own_data_stay_as_they_are(given, expected, caplog):
    assert sorted(rows(prepared(given))) == list(expected)
    assert not caplog.messages


class OwnLoader(DataLoader):
    def __iter__(self):
        return reversed(list(super().__iter__()))


@pytest.mark.parametrize(
    ("given", "first", "reason"),
    [
        (OwnLoader(DATA, batch_size=4), 16, "its class, OwnLoader, overrides __iter__"),
        (loader(sampler=itertools.repeat(3)), 3, "its sampler, a repeat, has no length"),
    ],
)
def test_loaders_that_cannot_be_partitioned_stay_as_they_are_with_a_warning(
    given, first, reason, caplog
):
    assert next(iter(prepared(given)))[0][0] == first
    assert reason in caplog.text
    assert "add_dist_sampler=False" in caplog.text


@pytest.mark.parametrize("partitions", [False, True])
def test_a_loader_that_is_prepared_twice_is_partitioned_once(partitions):
    once = [prepared(loader(shuffle=True), rank, partitions=partitions) for rank in range(2)]
    parts = [rows(prepared(each, rank)) for rank, each in enumerate(once)]
    assert sorted(parts[0] + parts[1]) == list(range(20))


@given(
    full_world_size=st.integers(2, 5),
    world_size=st.integers(1, 5),
    total=st.integers(1, 60),
    batch_size=st.integers(1, 6),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_steps_of_fewer_workers_keep_their_samples_and_weigh_batches_by_size(
    full_world_size, world_size, total, batch_size, shuffle, drop_last
):
    def steps(size, shares):
        loaders = [
            prepared(
                DataLoader(list(range(total)), batch_size, shuffle=shuffle, drop_last=drop_last),
                rank,
                size,
                prefetch=False,
                full_world_size=full_world_size,
                set_weight=shares[rank].append,
            )
            for rank in range(size)
        ]
        passes = [[batch.tolist() for batch in loader] for loader in loaders]
        assert [len(loader) for loader in loaders] == [len(each) for each in passes]
        return list(zip(*passes, strict=True))

    world_size = min(world_size, full_world_size)
    expected = steps(full_world_size, [[] for _ in range(full_world_size)])
    shares = [[] for _ in range(world_size)]
    found = steps(world_size, shares)
    flat = [[sorted(set(itertools.chain(*step))) for step in each] for each in (found, expected)]
    assert flat[0] == flat[1]
    used = list(itertools.chain(*flat[0]))
    assert len(used) == len(set(used))
    assert drop_last or len(used) == total
    for step, weights in zip(found, zip(*shares, strict=True), strict=False):
        sizes = [len(batch) for batch in step]
        assert max(sizes) - min(sizes) <= 1
        num = len(set(itertools.chain(*step)))
        counted = [size if rank < num else 0 for rank, size in enumerate(sizes)]
        assert list(weights) == pytest.approx([size * world_size / num for size in counted])


def test_the_last_batch_of_a_worker_may_be_larger_with_shares():
    used, weights = [], []
    for rank in range(3):
        given = {"shares": (0.3, 0.4, 0.3), "set_weight": weights.append, "prefetch": False}
        worker = prepared(DataLoader(list(range(17)), 3), rank, size=3, **given)
        batches = [batch.tolist() for batch in worker]
        assert len(worker) == len(batches) == 2
        used += itertools.chain(*batches)
    assert sorted(used) == list(range(17))
    assert weights == [1.0, 0.75, 1.0, 1.0, 1.5, 1.0, 1.0, 0.75, 1.0]


def test_batches_of_a_batch_sampler_weigh_by_size():
    weights, dropping = [], BatchSampler(range(5), 2, drop_last=True)
    for rank, batches in itertools.product(range(2), ([[0], [1, 2, 3], [4, 5]], dropping)):
        given = DataLoader(DATA, batch_sampler=batches)
        rows(prepared(given, rank, partitions="always", set_weight=weights.append))
    assert weights == [0.5, 2.0, 1.0, 1.0, 1.0, 1.5, 0.0, 1.0, 1.0, 1.0]


def test_loader_that_is_not_partitioned_begins_once_in_an_epoch():
    class Own(DataLoader):
        began = 0

        def __iter__(self):
            self.began += 1
            self.rest = super().__iter__()
            return self

        def __next__(self):
            return next(self.rest)

    own = Own(torch.arange(6), batch_size=2)
    worker = prepared(own, size=1, prefetch=False)
    assert [batch.tolist() for batch in worker] == [[0, 1], [2, 3], [4, 5]]
    assert own.began == 1
    before = sys.getrefcount(own)
    next(iter(worker))
    assert sys.getrefcount(own) == before  # an iterator would keep its processes


@on_gpu
def test_batches_that_are_moved_ahead_stay_intact_while_a_gpu_is_busy():
    data = TensorDataset(torch.arange(40 * 2**20, dtype=torch.float32).reshape(40, -1))
    given = DataLoader(data, batch_size=2, pin_memory=True)
    cuda = torch.device("cuda")
    sums = []
    for (batch,) in PreparedLoader(given, world_size=1, rank=0, device=cuda, prefetch=True, seed=0):
        torch.cuda._sleep(10**7)  # the next batch arrives meanwhile, in free memory
        sums.append(batch.double().sum())
    expected = [batch.double().sum() for (batch,) in given]
    assert torch.stack(sums).tolist() == torch.stack(expected).tolist()


@pytest.mark.parametrize(("count", "num_read"), [(0, 1), (0, 4), (3, 1), (3, 4), (None, 1)])
def test_a_worker_that_reads_alone_keeps_the_epoch_of_the_group(count, num_read):
    parts, clock = [], [count]
    for rank in range(2):
        clock[0] = count
        worker = prepared(loader(shuffle=True), rank, num_collectives=lambda: clock[0])
        if rank == 0:
            still_open = iter(worker)
            assert next(still_open) is not None
            assert len(list(itertools.islice(worker, num_read))) == min(num_read, 3)
        parts.append([])
        for _ in range(3):
            parts[rank].append([])
            for (batch,) in worker:
                parts[rank][-1] += batch.tolist()
                if count is not None:
                    clock[0] += 1
    for mine, others in zip(*parts, strict=True):
        assert sorted(mine + others) == list(range(20))
    assert len(set(map(tuple, parts[0]))) == 3


@pytest.mark.parametrize(("size", "clock"), [(2, itertools.count(1)), (1, itertools.repeat(0))])
def test_a_pass_that_all_workers_leave_early_has_a_new_order_each_time(size, clock):
    data = loader(shuffle=True)
    worker = prepared(data, 0, size, full_world_size=2, num_collectives=lambda: next(clock))
    assert len({tuple(next(iter(worker))[0].tolist()) for _ in range(4)}) == 4


def test_a_pass_counts_if_workers_communicate_after_it():
    clock = [3]
    worker = prepared(loader(shuffle=True), num_collectives=lambda: clock[0])
    orders = []
    for _ in range(3):
        orders += [rows(worker), rows(worker)]
        clock[0] += 1  # as in local SGD
    assert orders[0] == orders[1]
    assert len(set(map(tuple, orders))) == 3
    worker.sampler.set_epoch(worker.sampler.epoch)  # the user repeats an epoch
    assert rows(worker) == orders[-1]
