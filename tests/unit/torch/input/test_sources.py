"""Orders, partitions, and settings of the loaders that workers use."""

import copy
import itertools
import multiprocessing
import random
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from raysgd.data import Dataset as ItemDataset
from raysgd.data.partition import StepLayout
from raysgd.data.source import BatchSource
from raysgd.errors import CheckpointError
from raysgd.torch.input import orders
from raysgd.torch.input.loader_copies import without_states
from raysgd.torch.input.sources import wrap_loader
from tests.conftest import wait_until
from tests.ledger import Ids
from tests.operators import Streamed, make_data


class Numbers(Ids):
    """A data set other than TensorDataset, whose samples are tensors."""

    def __init__(self, size=20):
        super().__init__(size)

    def __getitem__(self, index):
        return torch.tensor(index)


class Reversed(Sampler):
    """A custom sampler."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return reversed(range(self.size))

    def __len__(self):
        return self.size


class OfEveryLibrary(Reversed):
    """A sampler that draws from the global generators of PyTorch, Python, and NumPy."""

    def __iter__(self):
        order = torch.randperm(self.size).tolist()
        random.shuffle(order)
        return iter(np.random.permutation(order).tolist())


def tensors(size=20):
    return TensorDataset(torch.arange(size), torch.arange(size) * 10.0)


def wrap(loader, **arguments):
    usual = {"training": True, "partitions": True, "world_size": 1, "rank": 0, "seed": 5}
    return wrap_loader(loader, **usual | arguments)


def indices(batches):
    """Return the samples of batches in order, for any batch format."""
    found = []
    for batch in batches:
        first = batch[0] if isinstance(batch, list | tuple) else batch
        found += torch.as_tensor(first).reshape(-1).tolist()
    return found


def group_batches(loader, world_size, epoch=0, **arguments):
    return [
        list(wrap(loader, world_size=world_size, rank=rank, **arguments).batches(epoch, 0))
        for rank in range(world_size)
    ]


# ---- orders


class Every(SequentialSampler):
    """A SequentialSampler with its own order."""

    def __iter__(self):
        return iter(range(0, len(self.data_source), 5))

    def __len__(self):
        return len(self.data_source) // 5


class Forever(Reversed):
    """An endless sampler that has a length."""

    def __iter__(self):
        return itertools.cycle(range(self.size))


def test_a_sampler_that_is_shorter_than_its_length_is_an_error():
    short = type("Short", (Reversed,), {"__iter__": lambda self: iter(range(7))})
    with pytest.raises(RuntimeError, match="Short yields 7 keys, but its length is 10"):
        next(wrap(DataLoader(tensors(), 2, sampler=short(10))).batches(0, 0))


class Drawn(Reversed):
    """A sampler whose length is an estimate until an epoch begins."""

    def __iter__(self):
        self.size = 7
        return super().__iter__()


class ByEpoch(Reversed):
    """A sampler whose order depends on `set_epoch`."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(self.size, generator=generator).tolist())


def seeded(seed):
    return torch.Generator().manual_seed(seed)


SAMPLERS = {
    "shuffle": lambda data: {"shuffle": True},
    "none": lambda data: {"shuffle": False},
    "own generator": lambda data: {"sampler": RandomSampler(data, generator=seeded(3))},
    "too many": lambda data: {"sampler": RandomSampler(data, num_samples=37)},
    "with replacement": lambda data: {"sampler": RandomSampler(data, True, num_samples=9)},
    "weighted": lambda data: {"sampler": WeightedRandomSampler([0.0] + [1.0] * 19, num_samples=15)},
    "subset": lambda data: {"sampler": SubsetRandomSampler([2, 3, 5, 7, 11, 13])},
    "own": lambda data: {"sampler": Reversed(20)},
    "own sequential": lambda data: {"sampler": Every(data)},
    "endless": lambda data: {"sampler": Forever(20)},
    "by epoch": lambda data: {"sampler": ByEpoch(20)},
    "of every library": lambda data: {"sampler": OfEveryLibrary(20)},
    "a list": lambda data: {"sampler": [4, 4, 2]},
    "generator": lambda data: {"shuffle": True, "generator": seeded(9)},
}
ORDERS = {
    "none": list(range(20)),
    "own": list(range(20))[::-1],
    "own sequential": [0, 5, 10, 15],
    "endless": list(range(20)),
    "a list": [4, 4, 2],
}
NO_PERMUTATION = {"too many", "with replacement", "weighted", "subset", "own sequential", "a list"}


@pytest.mark.parametrize("make_data", [tensors, Numbers])
@pytest.mark.parametrize("name", SAMPLERS)
def test_ranks_follow_one_order_that_a_shuffle_changes_each_epoch(name, make_data):
    data = make_data()
    loader = DataLoader(data, batch_size=3, **SAMPLERS[name](data))
    epochs = []
    for epoch in range(3):
        # each rank has its own process and random states
        apart = [copy.deepcopy(loader) for _ in range(2)]
        ranks = []
        for rank, mine in enumerate(apart):
            torch.manual_seed(100 + rank)
            random.seed(100 + rank)
            np.random.seed(100 + rank)
            ranks.append(list(wrap(mine, world_size=2, rank=rank).batches(epoch, 0)))
        order = []
        for batches in zip(*ranks, strict=True):
            order += indices(batches)
        size = len(loader.sampler)
        assert len(order) - size in (0, 1)  # a single last sample goes to both workers
        epochs.append(tuple(order[:size]))
        if name not in NO_PERMUTATION:
            assert sorted(order) == list(range(20))
        if name in ORDERS:
            assert order[:size] == ORDERS[name]
    assert len(set(epochs)) == (1 if name in ORDERS else 3)


@pytest.mark.parametrize("name", SAMPLERS)
def test_drawing_an_order_restores_the_random_generators(name, monkeypatch):
    # Seeding the GPU in each epoch would repeat the same dropout on every rank.
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("seeds the GPU"))
    loader = DataLoader(tensors(), batch_size=3, **SAMPLERS[name](tensors()))
    sampler_generator = getattr(loader.sampler, "generator", None)
    generators = [g for g in (loader.generator, sampler_generator) if g is not None]

    def states():
        numpy_state = np.random.get_state()
        return (
            torch.get_rng_state().tolist(),
            random.getstate(),
            numpy_state[1].tolist(),
            [g.get_state().tolist() for g in generators],
        )

    before = states()
    list(wrap(loader).batches(1, 0))
    assert states() == before


@pytest.mark.parametrize("size", [1, 2, 3, 1000, 65537])
def test_order_of_many_samples_has_each_once_and_is_random(size):
    with orders.seeding(5):
        order = orders.LazyPermutation(size, replacement=False)
        other = orders.LazyPermutation(size, replacement=False)
    found, after = order[0:size], order[size : 2 * size]
    assert sorted(found) == sorted(after) == list(range(size))
    assert size < 1000 or found != after
    assert found == order[0 : size // 2] + order[size // 2 : size]
    assert size < 1000 or found != other[0:size]
    places = torch.tensor(found, dtype=torch.float64)
    assert size < 1000 or abs(torch.corrcoef(torch.stack([places, torch.arange(size)]))[0, 1]) < 0.1


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        *itertools.product(["order", "shuffle", "replacement", "batches"], [2**31, sys.maxsize]),
        ("distributed", 2**31),  # which PyTorch rounds to float64
    ],
)
def test_huge_data_sets_start_immediately(kind, size):
    data = Ids(size)
    shuffled = RandomSampler(data, replacement=kind == "replacement")
    loader = {
        "order": lambda: DataLoader(data, 4),
        "batches": lambda: DataLoader(data, batch_sampler=BatchSampler(shuffled, 4, False)),
        "distributed": lambda: DataLoader(data, 4, sampler=DistributedSampler(data, 2, 0)),
    }.get(kind, lambda: DataLoader(data, 4, sampler=shuffled))
    ranks = [wrap(loader(), world_size=2, rank=rank) for rank in range(2)]
    assert ranks[0].epoch_order.digest(1) is None
    found = [next(source.batches(1, size - 9)).tolist() for source in ranks]
    assert len(ranks[0]) == ranks[0].steps_left(0) == -(-size // 8)
    found = list(itertools.chain(*found))
    assert all(0 <= index < size for index in found)
    assert len(set(found)) == 8
    assert (found == list(range(size - 9, size - 1))) == (kind == "order")


class ByName(Dataset):
    """A data set with keys that are not integers."""

    def __init__(self, keys):
        self.places = {key: place for place, key in enumerate(keys)}

    def __len__(self):
        return len(self.places)

    def __getitem__(self, key):
        return torch.tensor(self.places[key])


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("key", [str, lambda i: (i, str(i)), lambda i: i / 2, lambda i: 2**64 + i])
def test_sampler_may_yield_keys(key, num_workers):
    data = ByName([key(i) for i in range(10)])
    sampler = [key(i) for i in (3, 1, 4, 5, 9, 2, 6)]
    loader = DataLoader(data, batch_size=2, sampler=sampler, num_workers=num_workers)
    first, second = (wrap(loader, world_size=2, rank=rank) for rank in range(2))
    assert [b.tolist() for b in first.batches(0, 0)] == [[3, 1], [9, 2]]
    assert [b.tolist() for b in second.batches(1, 4)] == [[6]]
    assert indices(wrap(loader).batches(0, 2)) == [4, 5, 9, 2, 6]


@pytest.mark.parametrize("name", SAMPLERS)
def test_digest_identifies_an_order_that_the_seed_does_not_determine(name):
    loader = DataLoader(tensors(), batch_size=3, **SAMPLERS[name](tensors()))
    ranks = [wrap(copy.deepcopy(loader), world_size=2, rank=rank) for rank in range(2)]
    first, second = ([source.epoch_order.digest(epoch) for epoch in range(3)] for source in ranks)
    assert first == second
    if name in ("shuffle", "none", "own generator"):
        assert first == [None] * 3
    elif name == "generator":  # its seed identifies the order without drawing it
        assert first == [9] * 3
        assert not ranks[0].epoch_order.is_drawn(0)
    else:
        assert len(set(first)) == (1 if name in ORDERS else 3)
        assert all(0 <= digest < 2**62 for digest in first)


def test_sampler_may_yield_batches_without_collation():
    batches = BatchSampler(Reversed(7), 3, False)
    loader = DataLoader(torch.arange(7) * 10, batch_size=None, sampler=batches)
    first, second = group_batches(loader, 2, training=False)
    assert [batch.tolist() for batch in first] == [[60, 50, 40], [0]]
    assert [batch.tolist() for batch in second] == [[30, 20, 10]]


def test_digest_is_that_of_the_order_that_was_drawn():
    class OfItsOwn(Reversed):
        def __iter__(self):  # raysgd cannot seed this generator
            return iter(np.random.default_rng().permutation(self.size).tolist())

    def digest(order):
        return wrap(DataLoader(tensors(), batch_size=3, sampler=order)).epoch_order.digest(0)

    one, other = (wrap(DataLoader(tensors(), 3, sampler=OfItsOwn(20))) for _ in range(2))
    assert one.epoch_order.digest(0) != other.epoch_order.digest(0)
    assert one.epoch_order.digest(0) == digest(indices(one.batches(0, 0)))
    assert digest(["a", ("b", 1)]) == digest(["a", ("b", 1)]) != digest([("b", 1), "a"])


# ---- partitions


def test_loader_with_the_batch_share_follows_it():
    follows = wrap(DataLoader(tensors(), batch_size=4), world_size=2, worker_batch_size=4)
    other = wrap(DataLoader(tensors(), batch_size=5), world_size=2, worker_batch_size=4)
    for source in (follows, other):
        source.repartition(1, 0, 8)
    assert (follows.batch_size, other.batch_size) == (8, 5)
    assert [len(batch[0]) for batch in follows.batches(0, 0)] == [8, 8, 4]


def test_workers_read_by_their_shares_until_the_group_changes():
    loader = DataLoader(torch.arange(40.0)[:, None], batch_size=8)
    ranks = [wrap(loader, world_size=2, rank=rank) for rank in (0, 1)]
    sizes = {None: [[8, 8, 4], [8, 8, 4]], (3.0, 1.0): [[12, 12, 6], [4, 4, 2]]}
    for weights in (None, (3.0, 1.0), None, (3.0, 1.0)):
        for rank, source in enumerate(ranks):
            source.change_partition(shares=weights)
            batches = source.unread = source.batches(0, 0)
            source.change_partition(shares=weights)  # no change
            assert source.unread is not None
            assert [len(batch) for batch in batches] == sizes[weights][rank]
            assert source.plan(0, 1).num_samples == sizes[weights][rank][0]
    ranks[0].repartition(2, 0, None)
    assert [len(batch) for batch in ranks[0].batches(0, 0)] == sizes[None][0]


def test_smaller_group_keeps_the_batch_size_of_the_full_group():
    sizes = {"worker_batch_size": 10, "layout": StepLayout(4), "requested_global_batch_size": 20}
    source = wrap(DataLoader(tensors(), batch_size=10), training=False, world_size=2, **sizes)
    assert source.batch_size == 5
    ready = wrap(DataLoader(Numbers(4), batch_size=None), layout=StepLayout(2))
    assert indices(ready.batches(0, 0)) == [0, 1, 2, 3]


@pytest.mark.parametrize("follows", [False, True])
def test_replacement_adopts_the_batching_of_the_others(follows):
    """It sets up before it knows the group size, so its batch share may differ."""
    member = wrap(DataLoader(tensors(), batch_size=6), worker_batch_size=6 if follows else 3)
    replacement = wrap(DataLoader(tensors(), batch_size=4), worker_batch_size=2 if follows else 4)
    assert member.fingerprint() == replacement.fingerprint()
    for rank, source in enumerate((member, replacement)):
        source.repartition(2, rank, 3)
    replacement.set_batch_size(*member.batching())
    size = 3 if follows else 6
    assert replacement.batching() == member.batching() == (size, follows)
    batches = [list(source.batches(0, 0)) for source in (member, replacement)]
    assert len(batches[1][0][0]) == size
    assert sorted(i for part in batches for i in indices(part)) == list(range(20))
    replacement.repartition(2, 1, 5)
    assert replacement.batch_size == (5 if follows else 6)


def split(seed):
    return torch.utils.data.random_split(tensors(20), [10, 10], seeded(seed))[0]


@pytest.mark.parametrize(
    ("make", "generator", "is_same"),
    [
        (lambda n: split(1), None, True),
        (split, None, False),
        (lambda n: TensorDataset(torch.ones(8, 2)), None, True),
        (lambda n: TensorDataset(torch.full((8, 2), n)), None, False),
        (lambda n: TensorDataset(torch.eye(4).to_sparse()), None, True),
        (lambda n: tensors(), lambda n: torch.Generator(), True),
        (lambda n: tensors(), lambda n: torch.Generator() if n else None, False),
    ],
)
def test_fingerprint_shows_data_and_generators_that_differ(make, generator, is_same):
    first, second = (
        DataLoader(make(n), 4, shuffle=True, generator=generator(n) if generator else None)
        for n in range(2)
    )
    assert (wrap(first).fingerprint() == wrap(second).fingerprint()) == is_same


# ---- data sets of tensors


class Doubling(TensorDataset):
    def __getitem__(self, index):
        return tuple(column * 2 for column in super().__getitem__(index))


@pytest.mark.parametrize(
    "data",
    [tensors(), Doubling(torch.arange(20)), TensorDataset(torch.eye(20).to_sparse())],
    ids=["dense", "subclass", "sparse"],
)
def test_batches_of_tensors_are_those_of_a_plain_loader(data):
    def collate(samples):
        return default_collate([[column.to_dense() for column in sample] for sample in samples])

    fast = DataLoader(data, 3, collate_fn=collate if data.tensors[0].is_sparse else None)
    slow = DataLoader(data, 3, collate_fn=collate)
    torch.testing.assert_close(list(wrap(fast).batches(0, 0)), list(slow), rtol=0, atol=0)


@pytest.mark.parametrize("shuffle", [True, False])
def test_changing_a_batch_in_place_leaves_the_data_as_it_is(shuffle):
    data = tensors(8)
    source = wrap(DataLoader(data, batch_size=4, shuffle=shuffle))
    for features, _ in source.batches(0, 0):
        features.zero_()
    assert data.tensors[0].tolist() == list(range(8))
    data.tensors = tensors(11).tensors
    assert sorted(indices(source.batches(0, 0))) == list(range(11))


# ---- settings


def test_loader_without_collation_yields_one_item_per_step():
    ranks = group_batches(DataLoader(Numbers(5), batch_size=None, shuffle=True), 2)
    assert [len(batches) for batches in ranks] == [3, 3]
    assert {int(item) for batches in ranks for item in batches} == set(range(5))
    (alone,) = group_batches(DataLoader(Numbers(5), batch_size=None), 1)
    assert [int(item) for item in alone] == [0, 1, 2, 3, 4]
    assert alone[0].dim() == 0


@pytest.mark.parametrize("persistent", [True, False])
def test_worker_processes_of_the_loader_keep_the_order_and_end(persistent):
    before = set(multiprocessing.active_children())
    settings = {"batch_size": 2, "shuffle": True}
    loader = DataLoader(Numbers(12), num_workers=2, persistent_workers=persistent, **settings)
    source, plain = wrap(loader), wrap(DataLoader(Numbers(12), **settings))
    for epoch, offset in [(0, 0), (1, 0), (1, 4), (2, 8)]:
        expected = indices(plain.batches(epoch, offset))
        first = source.batches(epoch, offset)
        assert indices([next(first)]) == expected[:2]  # the iterator stays unfinished
        assert set(multiprocessing.active_children()) > before
        assert indices(source.batches(epoch, offset)) == expected
        source.end_processes()
        assert indices(source.batches(epoch, offset)) == expected
    assert loader._iterator is None
    assert isinstance(loader.batch_sampler, BatchSampler)
    del first
    source.end_processes()
    wait_until(lambda: set(multiprocessing.active_children()) <= before)


def test_every_setting_of_the_loader_is_kept():
    loader = DataLoader(
        Numbers(),
        batch_size=4,
        num_workers=1,
        collate_fn=tuple,
        timeout=7,
        worker_init_fn=seeded,
        multiprocessing_context="fork",
        generator=seeded(1),
        prefetch_factor=5,
        persistent_workers=True,
        in_order=False,
    )
    source = wrap(loader)
    source.batches(0, 0)
    kept = vars(source._kept_loader)
    differing = {name for name, value in vars(loader).items() if kept[name] is not value}
    expected = {"batch_sampler", "in_order"}  # a position needs the order
    assert differing == expected | {"_iterator", "generator"}
    source.end_processes()


# ---- loaders with their own order or partition


class Unsized(Sampler):
    """A sampler without a length, which PyTorch does not require."""

    def __init__(self):
        pass

    def __iter__(self):
        return iter([3, 1, 2])


class OwnBatches(BatchSampler):
    """A batch sampler that raysgd cannot replace."""


class EveryOther(ByEpoch):
    """A sampler that selects the samples of its worker. `num_replicas` shows this."""

    num_replicas = 2

    def __iter__(self):
        return iter([*super().__iter__()][::2])


class Twice(DataLoader):
    """A loader that overrides iteration."""

    def __iter__(self):
        return (batch for batch in super().__iter__() for _ in range(2))


class OfAllRanks(DistributedSampler):
    """A DistributedSampler with a different constructor."""

    def __init__(self, data):
        super().__init__(data, num_replicas=2, rank=1)


STREAMS = {
    "stream": lambda data: DataLoader(Streamed(range(8)), batch_size=2),
    "unsized": lambda data: DataLoader(data, sampler=Unsized()),
    "unsized batches": lambda data: DataLoader(data, batch_sampler=OwnBatches(Unsized(), 3, False)),
    "own iteration": lambda data: Twice(data, 4),
    "list": lambda data: [1, 2, 3],
}
BY_USER = {
    "own sampler": lambda data: DataLoader(data, sampler=EveryOther(20)),
    "own batches": lambda data: DataLoader(data, batch_sampler=OwnBatches(EveryOther(8), 3, False)),
    "own distributed sampler": lambda data: DataLoader(data, sampler=OfAllRanks(data)),
}


@pytest.mark.parametrize("name", STREAMS)
def test_loader_without_indices_is_read_as_a_stream(name):
    loader = STREAMS[name](tensors())
    ranks = [list(wrap(loader, world_size=2, rank=rank).batches(0, 0)) for rank in range(2)]
    in_turn = [each for pair in itertools.zip_longest(*ranks) for each in pair]
    expected = indices(loader)
    assert indices(in_turn)[: len(expected)] == expected


@pytest.mark.parametrize("name", [*BY_USER, "all"])
def test_loader_that_selects_samples_of_its_worker_is_not_partitioned(name):
    loader = BY_USER[name](tensors()) if name in BY_USER else DataLoader(tensors(), batch_size=3)
    source = wrap(loader, partitions=name in BY_USER, world_size=2, rank=0)
    assert (type(source), source.who_reads[:9]) == (BatchSource, "your code")
    first, second = (indices(source.batches(epoch, 0)) for epoch in range(2))
    assert (second, first == second) == (indices(loader), name not in BY_USER)


def parts_of(loader, epoch=0, **arguments):
    """Return the samples of each batch, by worker."""
    ranks = group_batches(loader, 2, epoch, **arguments)
    return [[indices([batch]) for batch in rank] for rank in ranks]


@pytest.mark.parametrize("partitions", [True, False])
@pytest.mark.parametrize("replicas", [(2, 1), (1, 0)])
@pytest.mark.parametrize("kind", [DistributedSampler, type("Named", (DistributedSampler,), {})])
def test_distributed_sampler_follows_the_group(partitions, replicas, kind):
    """A replacement worker creates its sampler in a group of one."""
    data = tensors(24)
    loader = DataLoader(data, batch_size=3, sampler=kind(data, *replicas, seed=5))
    for epoch in range(2):
        expected = [kind(data, 2, rank, seed=5) for rank in range(2)]
        for sampler in expected:
            sampler.set_epoch(epoch)
        ranks = [wrap(loader, partitions=partitions, world_size=2, rank=rank) for rank in range(2)]
        steps = zip(*(rank.batches(epoch, 0) for rank in ranks), strict=True)
        together = [sorted(indices(step)) for step in steps]
        given = list(zip(*map(list, expected), strict=True))
        assert together == [sorted(sum(given[i : i + 3], ())) for i in range(0, 12, 3)]
    assert (loader.sampler.num_replicas, loader.sampler.rank) == replicas  # unchanged
    first, second = parts_of(loader, training=False)
    assert sorted(itertools.chain(*first, *second)) == list(range(24))


@pytest.mark.parametrize("drop_last", [False, True])
def test_plain_batch_sampler_is_a_sampler_with_a_batch_size(drop_last):
    data, options = tensors(23), {"batch_size": 3, "drop_last": drop_last}
    # of the form of torchdata's
    named = {"__module__": "torchdata.stateful_dataloader.stateful_dataloader"}
    kinds = Twice, RandomSampler, BatchSampler, DistributedSampler
    stateful, shuffled, batched, divided = (type("Own", (kind,), named) for kind in kinds)
    batches = batched(shuffled(data), **options)
    loader = stateful(data, sampler=batches.sampler, **options)
    vars(loader)["batch_sampler"] = batches
    plain = DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), **options))
    loaders = loader, stateful(data, batch_sampler=batches), plain
    for epoch in range(2):
        expected = parts_of(DataLoader(data, shuffle=True, **options), epoch)
        assert all(parts_of(each, epoch) == expected for each in loaders)
    sampler = divided(data, 2, 0)
    batches = without_states(stateful(data, sampler=sampler, **options)).batch_sampler
    assert batches.sampler is sampler  # whose set_epoch user code may call


class Shuffled(OwnBatches):
    """Batches of consecutive samples, in random order."""

    def __iter__(self):
        batches = list(super().__iter__())
        return iter([batches[i] for i in torch.randperm(len(batches)).tolist()])


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("training", [False, True])
def test_each_batch_of_a_custom_batch_sampler_goes_to_one_worker(training, num_workers):
    data = tensors(20)
    batches = Shuffled(SequentialSampler(data), 3, False)
    loader = DataLoader(data, batch_sampler=batches, num_workers=num_workers)
    assert wrap(loader).global_batch_size is None  # a step has a number of batches, not of samples
    orders = []
    for epoch in range(2):
        first, second = parts_of(loader, epoch, training=training)
        orders.append([*itertools.chain(*itertools.zip_longest(first, second))])
        expected = [list(range(start, min(start + 3, 20))) for start in range(0, 20, 3)]
        given_twice = second[-1:] if training else []
        found = [batch for batch in orders[-1] if batch is not None]
        assert sorted(found) == sorted(expected + given_twice)
    assert orders[0] != orders[1]


def test_sampler_within_a_batch_sampler_follows_the_epoch():
    for inner in ByEpoch(9), RandomSampler(range(9), generator=seeded(3)):
        loader = DataLoader(tensors(9), batch_sampler=OwnBatches(inner, 3, False))
        first, second = (parts_of(loader, epoch) for epoch in range(2))
        assert first != second == parts_of(loader, epoch=1)


def test_iterator_is_not_read_ahead():
    """The next call would miss batches that were read ahead."""
    iterator = iter(range(5))
    assert list(wrap(iterator).batches(0, 0, 2)) == [0, 1]
    assert list(iterator) == [2, 3, 4]


# ---- data sets of items


def test_items_are_joined_by_columns_and_downloaded_by_one_worker():
    downloads = []
    items = ItemDataset(
        range(8),
        batch_size=2,
        download_func=lambda item: downloads.append(item) or item,
        transform=lambda i: (torch.tensor([i]), torch.full((3, 2), i)),
    )
    ranks = group_batches(items, 2)
    assert [indices(batches) for batches in ranks] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert {tuple(batch[1].shape) for batches in ranks for batch in batches} == {(6, 2)}
    assert sorted(downloads) == list(range(8))


def test_items_may_have_numbers_and_text_but_must_have_equally_many_columns():
    items = ItemDataset(range(3), batch_size=3, transform=lambda i: (torch.tensor(i), i, str(i)))
    ((scalars, numbers, texts),) = wrap(items).batches(0, 0)
    assert scalars.tolist() == numbers.tolist() == [0, 1, 2]
    assert list(texts) == ["0", "1", "2"]
    uneven = ItemDataset(range(1, 3), batch_size=2, transform=lambda i: (torch.ones(1),) * i)
    with pytest.raises(ValueError, match="longer"):
        list(wrap(uneven).batches(0, 0))


class Stopping(Numbers):
    def __getitem__(self, index):
        if index == 5:
            raise StopIteration
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("data", "batch_size", "world_size", "total"),
    [(Stopping(), 2, 2, 5), (Subset(Stopping(), range(6)), 5, 1, 2)],  # within, and the last one
)
def test_data_set_that_raises_stop_iteration_is_an_error(data, batch_size, world_size, total):
    loader = DataLoader(data, batch_size=batch_size)
    batches = wrap(loader, training=False, world_size=world_size).batches(0, 0)
    assert next(batches).tolist() == [*range(batch_size)]
    with pytest.raises(RuntimeError, match=rf"The loader ended after 1 of {total} batches"):
        list(batches)


# ---- the position of a checkpoint


class Shrinking(ByEpoch):
    """A sampler whose length depends on `set_epoch`."""

    epoch = 0

    def __len__(self):
        return self.size + 5 - self.epoch

    def __iter__(self):
        return iter(range(len(self)))


def test_an_epoch_has_the_length_that_its_sampler_has_then(make_trainer):
    for estimate in 10, 5:
        drawn = wrap(DataLoader(tensors(), 2, sampler=Drawn(estimate)))
        before = drawn.fingerprint()
        assert indices(drawn.batches(0, 0)) == [6, 5, 4, 3, 2, 1, 0]
        assert drawn.fingerprint() == before  # that of a worker that joins
    divided = type("Divided", (Shrinking,), {"num_replicas": 1})
    loaders = [DataLoader(make_data(20), 2, sampler=kind(2)) for kind in (Shrinking, divided)]
    read = {"__iter__": lambda self: iter(DataLoader(make_data(len(self)), 1))}
    for loader in *loaders, type("Loader", (Shrinking,), read)(2):
        trainer = make_trainer()
        both = {"train_loader": loader, "validation_loader": loader}
        trainer.apply_all_operators(lambda op, own=both: op.register_data(**own))
        assert [f()["num_samples"] for f in 2 * (trainer.train, trainer.validate)] == [7, 7, 6, 7]
        trainer.train(num_steps=1)
        loader.set_epoch = pytest.fail  # it may restart the iteration
        assert trainer.train(num_steps=1)["num_samples"] < 6


@pytest.mark.parametrize(
    "make",
    [
        lambda size: DataLoader(tensors(size), batch_size=2, shuffle=True),
        lambda size: DataLoader(tensors(), batch_size=2, sampler=SubsetRandomSampler(range(size))),
        lambda size: DataLoader(tensors(), batch_sampler=BatchSampler(range(size), 1, False)),
        lambda size: DataLoader(tensors(), batch_size=2, sampler=Shrinking(size)),
        lambda size: DataLoader(tensors(size), batch_size=2, sampler=EveryOther(size)),
    ],
)
def test_position_within_an_epoch_fits_only_data_of_its_length(make):
    saved = wrap(make(10))
    next(saved.batches(3, 0))
    info = saved.resume_info(3, 2)
    wrap(make(10), world_size=2).check_resume_info(info)
    for size in (9, 11):
        wrap(make(size)).check_resume_info(saved.resume_info(3, 0))  # the end of an epoch
        with pytest.raises(CheckpointError, match=r"its length was 1., and is "):
            wrap(make(size)).check_resume_info(info)


def test_position_within_an_epoch_fits_only_its_kind_of_data():
    sources = [wrap(DataLoader(data, 2)) for data in (Numbers(), Streamed(range(8)))]
    sources.append(wrap(DataLoader(Numbers(), 2), partitions=False))
    for source in sources:
        next(source.batches(0, 0))
    for saved, other in itertools.permutations(sources, 2):
        with pytest.raises(CheckpointError, match=r"epoch of .*, but the train loader has"):
            other.check_resume_info(saved.resume_info(0, 2))


class Counting(Reversed):
    """A sampler that counts its epochs."""

    epoch = 0

    def __iter__(self):
        self.epoch += 1
        return ByEpoch.__iter__(self)


class Key:
    __index__ = lambda self: 0  # noqa: E731


def test_position_within_an_epoch_fits_only_its_order():
    for kind in ByEpoch, Counting:
        saved, resumed = (wrap(DataLoader(tensors(10), 2, sampler=kind(10))) for _ in range(2))
        for epoch in range(2):
            next(saved.batches(epoch, 0))
        resumed.load_resume_info(saved.resume_info(1, 4))
        assert resumed.resume_info(1, 4) == saved.resume_info(1, 4)
        if kind is ByEpoch:
            assert indices(resumed.batches(1, 4)) == indices(saved.batches(1, 4))
    other = wrap(DataLoader(tensors(10), 2))
    for loader in resumed, other:
        loader.load_resume_info(saved.resume_info(1, 4))
        with pytest.raises(RuntimeError, match=r"(Counting|SequentialSampler) gives another order"):
            next(loader.batches(1, 4))
    by_key = (wrap(DataLoader([0] * 10, 2, sampler=[Key() for _ in range(10)])) for _ in range(2))
    saved, resumed = by_key  # keys without a `repr` cannot be compared
    next(saved.batches(0, 0))
    resumed.load_resume_info(saved.resume_info(0, 4))
    next(resumed.batches(0, 4))
    list(other.batches(0, 0))
    shuffled = wrap(DataLoader(tensors(10), 2, shuffle=True))
    shuffled.load_resume_info(other.resume_info(0, 4))
    with pytest.raises(RuntimeError, match="RandomSampler gives another order"):
        next(shuffled.batches(0, 4))
