"""The position of prepared loaders: each sample of an epoch once, on any number of workers."""

import functools
import pickle
from multiprocessing import active_children

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
)

from raysgd.data import Stream, text
from raysgd.errors import CheckpointError
from raysgd.train.torch.prepared_loader import PreparedLoader
from tests.operators import Streamed

DATA = list(range(61))


def batches(data):
    return BatchSampler(RandomSampler(data), 3, drop_last=False)


MAKE = {
    "shuffled": lambda: DataLoader(DATA, 3, shuffle=True),
    "in order": lambda: DataLoader(DATA, 3),
    "generator": lambda: DataLoader(
        DATA, 3, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "large seed": lambda: DataLoader(DATA, 3, shuffle=True, generator=torch.Generator()),
    "sampler": lambda: DataLoader(DATA, 3, sampler=SubsetRandomSampler(range(6, 61))),
    "drop_last": lambda: DataLoader(DATA, 3, shuffle=True, drop_last=True),
    "processes": lambda: DataLoader(
        DATA, 3, shuffle=True, num_workers=1, prefetch_factor=4, persistent_workers=True
    ),
    "batch_sampler": lambda: DataLoader(DATA, batch_sampler=batches(DATA)),
    "iterable": lambda: DataLoader(Streamed(DATA), 3),
    "stream": lambda: DataLoader(Stream(text("data.txt"), transform=int, shuffle=8), 3),
    "grouped": lambda: DataLoader(
        Stream(
            text("data.txt"), transform=lambda lines: [*map(int, lines)], group_size=2, shuffle=8
        ),
        3,
    ),
}


@pytest.fixture(autouse=True)
def data_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "data.txt").write_text("".join(f"{number}\n" for number in DATA))


class Group:
    """The loaders of a group of workers, which restart from a state."""

    def __init__(self, make, size, state=None, **others):
        self.weights, self.loaders = [1.0] * size, []
        for rank in range(size):
            torch.manual_seed(rank)  # the random numbers of workers differ
            # Loading replaces the seed.
            others = {"device": torch.device("cpu"), "prefetch": False, "seed": size, **others}
            weigh = functools.partial(self.weights.__setitem__, rank)
            loader = PreparedLoader(make(), world_size=size, rank=rank, set_weight=weigh, **others)
            self.loaders.append(loader)
            if state is not None:
                loader.load_state_dict(pickle.loads(pickle.dumps(state)))

    def train(self, num_steps=None):
        """Yield the samples of up to `num_steps` steps, without repeated ones."""
        for number, step in enumerate(zip(*self.loaders, strict=True), start=1):
            for batch, weight in zip(step, self.weights, strict=True):
                yield from batch.tolist() if weight else ()
            if number == num_steps:
                return

    def state(self):
        first, *others = (loader.state_dict() for loader in self.loaders)
        assert all(each == first for each in others)
        return first


@pytest.mark.parametrize("kind", MAKE)
def test_each_sample_counts_once_over_restarts_on_other_numbers_of_workers(kind):
    make, state, ledger = MAKE[kind], None, []
    partitions = "always" if kind in ("batch_sampler", "iterable") else True
    sizes, others = ((4, 2), (3, 1), (1, 2), (2, 2), (3, None)), set(active_children())
    for size, num_steps in sizes:
        group = Group(make, size, state, partitions=partitions)
        ledger += group.train(num_steps)
        state = group.state()
    items = DATA[6:] if kind == "sampler" else DATA
    assert len(ledger) == len(set(ledger))
    assert set(ledger) == set(items) or (kind == "drop_last" and len(ledger) > 61 - 9)
    assert (state["epoch"], state["offset"]) == (1, 0)
    if kind == "processes":
        del group
        assert set(active_children()) <= others  # without a garbage collection, which waits for 5 s
        return

    again = Group(make, 2, state, partitions=partitions)
    first, second = list(again.train()), list(again.train())
    assert len(first) >= len(items) - 6 * (kind == "drop_last")
    assert (first != second) == (kind not in ("in order", "iterable"))
    assert first == list(Group(make, 2, state, partitions=partitions).train())


def test_a_state_of_the_last_step_is_followed_by_an_empty_pass():
    begun = [0]
    group = Group(MAKE["shuffled"], 2, num_collectives=lambda: begun[0])
    for _ in group.train(11):
        begun[0] += 1
    resumed = Group(MAKE["shuffled"], 3, group.state(), num_collectives=lambda: begun[0])
    assert list(resumed.train()) == []
    assert resumed.state()["epoch"] == 1
    assert sorted(resumed.train()) == DATA


def test_a_loaded_state_holds_for_the_next_pass():
    state = Group(MAKE["shuffled"], 2).state()
    assert (state["epoch"], state["offset"]) == (0, 0)
    group = Group(MAKE["shuffled"], 2)
    used = list(group.train(3))
    state = group.state()
    rest = sorted(set(DATA) - set(used))
    list(group.train(2))
    for loader in group.loaders:  # after the first pass, within another one
        loader.load_state_dict(state)
    assert group.state() == state
    for loader in group.loaders:
        loader.sampler.set_epoch(0)  # as many loops do before each pass
    assert sorted(group.train()) == rest
    for loader in group.loaders:
        loader.sampler.set_epoch(0)
    assert sorted(group.train()) == DATA


def test_a_worker_that_looks_at_a_batch_alone_does_not_move_the_position():
    (first, _), begun = Group(MAKE["shuffled"], 2, num_collectives=lambda: begun[0]).loaders, [3]
    before = first.state_dict()
    next(iter(first))
    assert first.state_dict() == before
    batches = iter(first)
    next(batches)
    for number in (4, None):  # unknown, because the function has created a group
        begun[0] = number
        assert first.state_dict()["offset"] == 6


def test_a_loader_that_is_not_split_fits_the_same_number_of_workers():
    group = Group(MAKE["iterable"], 2)
    list(group.train(2))
    state = group.state()
    assert (state["epoch"], state["offset"]) == (0, 2)
    assert next(iter(Group(MAKE["iterable"], 2, state).train())) == 6
    with pytest.raises(ValueError, match=r"of 2 workers within an epoch, and there are 3.*always"):
        Group(MAKE["iterable"], 3, state)
    for wrong in (state, {}):
        with pytest.raises(ValueError, match=r"the state has \[.*the same add_dist_sampler"):
            Group(MAKE["iterable"], 2, wrong, partitions="always")
    list(group.train())
    assert list(Group(MAKE["iterable"], 3, group.state()).train())[:3] == [0, 1, 2]

    Group(lambda: DataLoader(DATA, 3, sampler=DistributedSampler(DATA, 2, 0)), 2).state()
    for make, partitions in ((MAKE["batch_sampler"], True), (MAKE["shuffled"], False)):
        with pytest.raises(ValueError, match=r"is random, and raysgd does not split it.*always"):
            Group(make, 2, partitions=partitions).state()


@pytest.mark.parametrize("kind", ["shuffled", "stream", "grouped"])
def test_changed_data_is_an_error_within_an_epoch(kind, tmp_path):
    group = Group(MAKE[kind], 2)
    list(group.train(2))
    (tmp_path / "data.txt").write_text("".join(f"{number}\n" for number in range(70)))
    make = MAKE[kind] if kind != "shuffled" else lambda: DataLoader(DATA[:9], 3, shuffle=True)
    with pytest.raises(CheckpointError, match=r"changed|differ"):
        Group(make, 3, group.state())
