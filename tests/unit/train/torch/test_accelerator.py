"""Models, loaders and optimizers made ready, in this process."""

import datetime
import itertools
import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from raysgd import train
from raysgd._internal.context import WorkerContext
from raysgd.backends import create_backend
from raysgd.comm.torch_store import TorchStore
from raysgd.train import session
from raysgd.train.report_queue import ReportQueue
from raysgd.train.torch.loading import prepared_loader
from tests.conftest import run_ranks
from tests.operators import on_gpu


@pytest.fixture(autouse=True)
def run():
    """One worker's run, so that what is prepared is forgotten afterwards."""
    running = session.Session(session.Plan("one", b""), WorkerContext(), ReportQueue())
    session.enter(running)
    yield running
    session.leave(running)


def loader(num=20, **arguments):
    return DataLoader(TensorDataset(torch.arange(num)), batch_size=4, **arguments)


def shared(given, rank=0, size=2):
    return prepared_loader(
        given, world_size=size, rank=rank, device=torch.device("cpu"), ahead=True, seed=0
    )


def rows(given):
    return [row for (batch,) in given for row in batch.tolist()]


def test_each_worker_gets_its_part():
    parts = [rows(shared(loader(), rank)) for rank in range(2)]
    assert sorted(parts[0] + parts[1]) == list(range(20))
    assert parts[0] == sorted(parts[0])  # one that does not shuffle goes on so
    assert len(shared(loader())) == 3


def test_a_shuffled_loader_goes_on_shuffling_in_another_order_each_time():
    parts = [shared(loader(shuffle=True), rank) for rank in range(2)]
    first, second = ([rows(part) for part in parts] for _ in range(2))
    for passed in (first, second):
        assert sorted(passed[0] + passed[1]) == list(range(20))
    assert first != second
    assert first[0] != sorted(first[0])


def test_the_user_may_set_the_epoch():
    given = shared(loader(shuffle=True))
    first = rows(given)
    rows(given)
    given.sampler.set_epoch(0)
    assert rows(given) == first


@pytest.mark.parametrize("kind", ["shuffled", "subset", "their own"])
def test_an_epoch_that_was_set_before_the_first_pass_holds(kind):
    def make():
        if kind == "shuffled":
            return loader(shuffle=True)
        if kind == "subset":
            return loader(sampler=SubsetRandomSampler(range(20)))
        return loader(sampler=DistributedSampler(range(20), num_replicas=2, rank=0))

    begun = shared(make())
    passes = [rows(begun) for _ in range(5)]
    resumed = shared(make())
    resumed.sampler.set_epoch(3)
    assert [rows(resumed), rows(resumed)] == passes[3:]
    given = make()
    if kind == "their own":
        given.sampler.set_epoch(3)
        assert rows(shared(given)) == passes[3]


def test_an_epoch_that_was_set_holds_where_a_pass_had_come_to_it_by_itself():
    given = shared(loader(shuffle=True))
    found = []
    for epoch in range(3):
        given.sampler.set_epoch(epoch)
        found.append([rows(given), rows(given)])  # twice through it in each epoch
    assert found[0][1] == found[1][0]
    assert found[1][1] == found[2][0]
    assert given.sampler.epoch == 3


def test_the_epoch_is_noticed_where_a_sampler_makes_a_plain_number_of_it():
    class Own(DistributedSampler):
        def set_epoch(self, epoch):
            self.epoch = int(epoch)

    given = shared(loader(sampler=Own(range(20), num_replicas=2, rank=0)))
    passes = [rows(given) for _ in range(3)]
    assert passes[0] != passes[1] != passes[2]
    given.sampler.set_epoch(1)
    assert rows(given) == passes[1]


def test_the_epoch_of_a_shared_sampler_can_be_set_on_the_users_own():
    class Own:
        epoch = 2

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __len__(self):
            return 8

        def __iter__(self):
            return iter(range(self.epoch, self.epoch + 8))

    sampler = Own()
    given = shared(loader(sampler=sampler))
    assert [rows(given)[0], rows(given)[0]] == [2, 3]
    sampler.set_epoch(3)
    assert [rows(given)[0], rows(given)[0]] == [3, 4]
    given.sampler.set_epoch(7)
    assert [rows(given)[0], rows(given)[0]] == [7, 8]


def test_a_loader_of_one_worker_or_over_an_iterable_is_not_shared_out():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([torch.tensor([n]) for n in range(4)])

    assert rows(shared(loader(), size=1)) == list(range(20))
    stream = shared(DataLoader(Stream(), batch_size=2))
    assert sum(len(batch) for batch in stream) == 4


def test_a_loader_with_its_own_batch_sampler_is_left_as_it_is():
    data = TensorDataset(torch.arange(20))
    backwards = BatchSampler(range(19, -1, -1), 8, drop_last=False)
    found = shared(DataLoader(data, batch_sampler=backwards))
    assert [len(batch) for (batch,) in found] == [8, 8, 4]
    assert rows(found) == list(range(19, -1, -1))


def parts_of(make, passes=1, size=2):
    """What each worker gets in the last of so many passes; `make` makes its loader."""
    parts = []
    for rank in range(size):
        random.seed(rank)  # workers' own random numbers differ
        torch.manual_seed(rank)
        made = shared(make(), rank, size)
        parts.append([rows(made) for _ in range(passes)][-1])
    return parts


def test_a_subset_sampler_is_shared_out_and_nothing_else_of_the_data():
    def make():
        return loader(sampler=SubsetRandomSampler(range(6, 16)))

    first, second = parts_of(make), parts_of(make, passes=2)
    for parts in (first, second):
        assert [len(part) for part in parts] == [5, 5]
        assert sorted(parts[0] + parts[1]) == list(range(6, 16))
    assert first != second
    assert len(shared(make())) == 2
    assert len(shared(make()).sampler) == 5


def test_the_epoch_of_a_shared_sampler_can_be_set_and_the_workers_random_numbers_stay():
    generator = torch.Generator().manual_seed(5)
    sampler = SubsetRandomSampler(range(10), generator=generator)
    given = shared(loader(sampler=sampler))
    assert isinstance(given.sampler, DistributedSampler)  # as scripts ask before they set it
    assert (given.sampler.num_replicas, given.sampler.rank) == (2, 0)
    states = generator.get_state(), random.getstate()
    first = rows(given)
    assert torch.equal(generator.get_state(), states[0])
    assert random.getstate() == states[1]
    rows(given)
    given.sampler.set_epoch(0)
    assert rows(given) == first


def test_a_weighted_sampler_keeps_its_weights_and_its_number():
    weights = [0.0] * 18 + [1.0, 1.0]
    first, second = parts_of(lambda: loader(sampler=WeightedRandomSampler(weights, 31)))
    assert sorted([len(first), len(second)]) == [15, 16]
    assert set(first + second) == {18, 19}


def test_what_draws_a_part_of_the_data_is_not_taken_for_a_shuffle():
    data = range(20)
    found = parts_of(lambda: loader(sampler=RandomSampler(data, num_samples=6)))
    assert [len(set(part)) for part in found] == [3, 3]
    first, second = parts_of(lambda: loader(sampler=RandomSampler(data, replacement=True)))
    assert len(set(first + second)) < len(first + second) == 20
    assert parts_of(lambda: loader(sampler=SequentialSampler(range(5)))) == [[0, 1, 2], [3, 4]]
    assert parts_of(lambda: loader(sampler=[7, 3]), size=5) == [[7], [3], [7], [3], [7]]
    assert parts_of(lambda: loader(sampler=[])) == [[], []]


def test_a_sampler_of_the_users_own_hears_of_the_epoch():
    heard = []

    class Own:
        def set_epoch(self, epoch):
            heard.append(epoch)

        def __len__(self):
            return 8

        def __iter__(self):
            return iter(random.sample(range(8), 8))

    parts = parts_of(lambda: loader(sampler=Own()), passes=2)
    assert sorted(parts[0] + parts[1]) == list(range(8))
    assert heard == [0, 1, 0, 1]


RANK_OF_TWO = """
import sys
import numpy as np, torch, torch.distributed as dist
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset
from raysgd.train.torch.loading import prepared_loader

join()

class Own:
    def __init__(self, seed):
        self.numbers = np.random.default_rng(seed)
    def __len__(self):
        return 20
    def __iter__(self):
        return iter(self.numbers.permutation(20))

def prepared(seed, run, sampler=None):
    sampler = sampler or Own(seed)
    loader = DataLoader(TensorDataset(torch.arange(20)), batch_size=4, sampler=sampler)
    return prepared_loader(
        loader, world_size=2, rank=rank, device=None, ahead=False, seed=0, run=run
    )

alike = [prepared(7, "a"), prepared(8, "a")]
for _ in range(2):  # each has another order, and each pass
    passes = [[row for (batch,) in loader for row in batch.tolist()] for loader in alike]
    for rows in passes:
        both = [None, None]
        dist.all_gather_object(both, rows)
        assert sorted(both[0] + both[1]) == list(range(20))
    alike[0].sampler.set_epoch(0)  # the same epoch again, in another order

dist.barrier()
if rank == 0:  # no pass of the other's
    for _ in range(3):
        list(alike[0])
dist.barrier()

different = prepared(rank, "b")
if rank == 0:
    assert len(list(different)) == 3
dist.barrier()
if rank == 1:
    try:
        list(different)
    except RuntimeError as error:
        assert "orders of epoch 0 differ, as Own gives them" in str(error)
    else:
        raise AssertionError("it was not refused")
dist.barrier()
if rank == 0:
    list(prepared(9, "c", SubsetRandomSampler(range(8))))  # of one worker alone
list(prepared(9, "c"))  # another run knows nothing of it
dist.barrier()
dist.destroy_process_group()
print("good")
"""


def test_orders_that_differ_from_worker_to_worker_are_refused_and_nobody_is_waited_for():
    run_ranks(RANK_OF_TWO, 2)


@pytest.fixture
def places():
    """The process group's places of two workers in a store such as raysgd has."""
    backend = create_backend("gloo", 30)
    rendezvous = backend.prepare(["127.0.0.1"])
    yield TorchStore(rendezvous.store, datetime.timedelta(seconds=30))
    backend.close()


def test_orders_are_compared_by_the_store_that_a_run_has(monkeypatch, places):
    class Own(list):
        pass

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    # as init_process_group wraps it
    store = dist.PrefixStore("default_pg", places)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    first, second = (shared(loader(sampler=Own(order)), r) for r, order in enumerate(["ab", "ba"]))
    assert list(first.sampler) == ["a"]
    with pytest.raises(RuntimeError, match="differ, as Own gives them"):
        list(second.sampler)
    places.interrupt()  # the generation was given up, of which a collective tells
    assert list(second.sampler) == ["a"]
    assert list(shared(loader(sampler=Own("ba")), 1).sampler) == ["a"]


@pytest.mark.parametrize("nested", [False, True])
def test_a_sampler_that_is_for_one_worker_of_several_is_left_as_it_is(nested, caplog):
    class Own:
        num_replicas, rank = 2, 1

        def __len__(self):
            return 2

        def __iter__(self):
            return iter([1, 3])

    sampler = BatchSampler(Own(), 2, drop_last=False) if nested else Own()
    data = TensorDataset(torch.arange(20))
    found = shared(DataLoader(data, batch_size=None if nested else 4, sampler=sampler))
    assert rows(found) == [1, 3]
    assert not caplog.messages


def test_a_loader_that_iterates_in_its_own_way_is_left_as_it_is_with_a_warning(caplog):
    class OwnLoader(DataLoader):
        def __iter__(self):
            return reversed(list(super().__iter__()))

    given = OwnLoader(TensorDataset(torch.arange(6)), batch_size=4)
    assert rows(shared(given)) == [4, 5, 0, 1, 2, 3]
    (message,) = caplog.messages
    assert "OwnLoader has an __iter__ of its own" in message
    assert "add_dist_sampler=False" in message


def test_a_sampler_without_a_length_is_left_as_it_is_with_a_warning(caplog):
    class Endless:
        def __iter__(self):
            while True:
                yield 3

    batches = iter(shared(loader(sampler=Endless())))
    assert next(batches)[0].tolist() == [3, 3, 3, 3]
    assert "Endless, has no length" in caplog.text


def test_a_loader_that_is_prepared_twice_is_shared_out_once(caplog):
    once = [shared(loader(shuffle=True), rank) for rank in range(2)]
    parts = [rows(shared(each, rank)) for rank, each in enumerate(once)]
    assert sorted(parts[0] + parts[1]) == list(range(20))
    left = [shared(loader(), size=1) for _ in range(2)]
    parts = [rows(shared(each, rank)) for rank, each in enumerate(left)]
    assert sorted(parts[0] + parts[1]) == list(range(20))
    assert not caplog.messages


def test_a_prepared_loader_has_what_the_loader_has():
    given = loader(drop_last=True)
    made = train.torch.prepare_data_loader(given)
    assert isinstance(made, DataLoader)
    assert (made.batch_size, made.dataset, made.drop_last) == (4, given.dataset, True)
    assert len(made) == len(given)
    assert rows(made) == list(range(20))


@pytest.mark.parametrize("given", [[1, 2], TensorDataset(torch.arange(2))])
def test_what_is_no_loader_is_refused(given):
    with pytest.raises(TypeError, match=f"and not a {type(given).__name__}. Read a part"):
        train.torch.prepare_data_loader(given)


@pytest.mark.parametrize("model", [torch.nn.ReLU(), torch.nn.Linear(1, 1).requires_grad_(False)])
@pytest.mark.parametrize("moves", [True, False])
def test_a_model_without_anything_to_train_is_refused_by_ddp(monkeypatch, model, moves):
    monkeypatch.setattr("raysgd.train.torch.accelerator.world_size", lambda: 2)
    with pytest.raises(ValueError, match=r"nothing to average .* Pass parallel_strategy=None"):
        train.torch.prepare_model(model, move_to_device=moves)
    assert train.torch.prepare_model(model, parallel_strategy=None) is model


def test_accelerate_comes_once_and_first():
    train.torch.accelerate(amp=True)
    with pytest.raises(RuntimeError, match="once"):
        train.torch.accelerate()


def test_accelerate_after_a_model_is_an_error():
    train.torch.prepare_model(torch.nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match="before prepare_model"):
        train.torch.accelerate(amp=True)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"wrap_ddp": "fsdp"}, TypeError, "Pass parallel_strategy=... and"),
        ({"parallel_strategy": "zero"}, ValueError, 'must be "ddp", "fsdp" or None'),
        ({"parallel_strategy": "fsdp", "wrap_ddp": False}, ValueError, "leave wrap_ddp and"),
        ({"parallel_strategy": "fsdp", "ddp_kwargs": {}}, ValueError, "leave wrap_ddp and"),
        ({"parallel_strategy_kwargs": {}, "ddp_kwargs": {}}, ValueError, "Leave out one"),
    ],
)
def test_arguments_of_a_model_that_say_two_things_are_refused(arguments, error, match):
    with pytest.raises(error, match=match):
        train.torch.prepare_model(torch.nn.Linear(1, 1), **arguments)


def test_with_mixed_precision_a_model_computes_in_it_and_returns_float32():
    train.torch.accelerate(amp=True)
    seen = []

    class Model(torch.nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            seen.append(y.dtype)
            return {"y": y, "pair": (y, 1)}

    model = train.torch.prepare_model(Model(2, 2))
    found = model(torch.ones(1, 2))
    assert seen == [torch.bfloat16]
    assert found["y"].dtype == found["pair"][0].dtype == torch.float32


def test_a_prepared_optimizer_is_the_optimizer_to_all_who_ask():
    train.torch.accelerate(amp=True)
    model = train.torch.prepare_model(torch.nn.Linear(2, 1))
    plain = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    optimizer = train.torch.prepare_optimizer(plain)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    before = model.weight.detach().clone()
    optimizer.zero_grad()
    train.torch.backward(model(torch.ones(4, 2)).sum())
    optimizer.step()
    scheduler.step()
    assert not torch.equal(model.weight, before)
    assert plain.param_groups[0]["lr"] == pytest.approx(0.05)
    assert optimizer.state_dict() == plain.state_dict()
    optimizer.load_state_dict(plain.state_dict())
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: 1)


def test_without_mixed_precision_an_optimizer_is_left_as_it_is():
    model = train.torch.prepare_model(torch.nn.Linear(2, 1))
    plain = torch.optim.SGD(model.parameters(), lr=0.5)
    assert train.torch.prepare_optimizer(plain) is plain
    train.torch.backward(model(torch.ones(1, 2)).sum())
    assert model.weight.grad is not None


def test_the_same_seed_gives_the_same_numbers(monkeypatch):
    held = torch.are_deterministic_algorithms_enabled()
    # what it changes for good, the fixture gives back
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    for name in ("deterministic", "benchmark"):
        monkeypatch.setattr(torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))
    try:
        drawn = []
        for _ in range(2):
            train.torch.enable_reproducibility(seed=3)
            drawn.append(torch.rand(3).tolist())
        assert drawn[0] == drawn[1]
    finally:
        torch.use_deterministic_algorithms(held)


@given(
    full_size=st.integers(1, 5),
    world_size=st.integers(1, 5),
    total=st.integers(1, 60),
    batch_size=st.integers(1, 6),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_steps_of_fewer_workers_are_those_of_the_full_group_and_count_by_their_samples(
    full_size, world_size, total, batch_size, shuffle, drop_last
):
    def steps(size, shares):
        loaders = [
            prepared_loader(
                DataLoader(list(range(total)), batch_size, shuffle=shuffle, drop_last=drop_last),
                world_size=size,
                rank=rank,
                device=None,
                ahead=False,
                seed=3,
                full_size=full_size,
                weigh=shares[rank].append,
            )
            for rank in range(size)
        ]
        passes = [[batch.tolist() for batch in loader] for loader in loaders]
        assert [len(loader) for loader in loaders] == [len(each) for each in passes]
        return list(zip(*passes, strict=True))

    world_size = min(world_size, full_size)
    expected = steps(full_size, [[] for _ in range(full_size)])
    if full_size == 1:
        return
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


@on_gpu
def test_batches_that_are_moved_ahead_stay_whole_while_a_gpu_is_busy():
    data = TensorDataset(torch.arange(40 * 2**20, dtype=torch.float32).reshape(40, -1))
    given = DataLoader(data, batch_size=2, pin_memory=True)
    device = torch.device("cuda")
    sums = []
    for (batch,) in prepared_loader(given, world_size=1, rank=0, device=device, ahead=True, seed=0):
        torch.cuda._sleep(10**7)  # the next one arrives meanwhile, in memory that is free
        sums.append(batch.double().sum())
    expected = [batch.double().sum() for (batch,) in given]
    assert torch.stack(sums).tolist() == torch.stack(expected).tolist()
