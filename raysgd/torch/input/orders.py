"""The orders that samplers draw in an epoch."""

import contextlib
import copy
import hashlib
import itertools
import random
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torch.utils.data.distributed import DistributedSampler

from raysgd._internal.collectives import Collectives
from raysgd.data.source import set_loader_epoch
from raysgd.data.stream import SampleKeys
from raysgd.loop.train_state import RandomGenerators

MAX_EAGER_ORDER = 2**24
"""Number of samples above which a shuffled order is computed where it is read."""


class LazyPermutation:
    """A shuffled order of many samples that needs no memory and no time for the whole epoch.

    A Feistel network permutes the numbers of an even number of bits. Numbers that are too large are
    permuted again until they fit (cycle walking). Places after the size have further orders. See
    Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002.
    """

    def __init__(self, size: int, replacement: bool) -> None:
        self._size, self._replacement = size, replacement
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._keys = torch.randint(2**62, (8,)).tolist()

    def __getitem__(self, span: slice) -> list[int]:
        return [self._at(position) for position in range(span.start, span.stop)]

    def _at(self, position: int) -> int:
        if self._replacement:  # random numbers, which repeat
            return hash((position, *self._keys)) % self._size
        (turn, index), mask = divmod(position, self._size), (1 << self._half) - 1
        while True:
            left, right = index >> self._half, index & mask
            for key in self._keys:
                left, right = right, left ^ (hash((right, key + turn)) & mask)
            if (index := left << self._half | right) < self._size:
                return index


Order = torch.Tensor | list[Any] | LazyPermutation | SampleKeys | None
"""Order of an epoch: indices or other keys of a sampler. None means the order of the data set."""


@contextlib.contextmanager
def seeding(seed: int, generator: Any = None) -> Iterator[None]:
    """Seed the global generators and a PyTorch `generator`.

    Restore them at the end of the context.
    """
    generator = generator if isinstance(generator, torch.Generator) else torch.Generator()
    before = generator.get_state()
    with RandomGenerators().preserving_state(), torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        for each in (torch.default_generator, generator):  # torch.manual_seed also reseeds GPUs
            each.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(before)


def seed_all(*numbers: int) -> None:
    """Seed the global generators of torch, NumPy, and random. Equal bits depend on this hash."""
    seed = hash(numbers)
    # On a CPU, torch.manual_seed takes 0.2 ms, and keeps a stack for each device that may follow.
    torch.default_generator.manual_seed(seed % 2**63)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed % 2**63)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def draw_order(sampler: Any, seed: int) -> Order:
    """Return the order that a sampler draws if all random numbers follow from `seed`."""
    if type(sampler) is SequentialSampler:
        return None
    inner = getattr(sampler, "sampler", None)  # of a batch sampler
    with seeding(seed, getattr(sampler, "generator", getattr(inner, "generator", None))):
        if is_plain_shuffle(sampler):
            size = len(sampler.data_source)
            return (
                torch.randperm(size)
                if size <= MAX_EAGER_ORDER
                else LazyPermutation(size, sampler.replacement)
            )
        # Stop an endless sampler after its length. Let others end, and perhaps count their epochs.
        iterator = iter(sampler)
        keys = list(itertools.islice(iterator, 1))
        size = len(sampler)  # late, because `__iter__` may make the length exact
        keys += itertools.islice(iterator, size)
    if len(keys) < min(size, len(sampler)):
        raise RuntimeError(
            f"{type(sampler).__name__} yields {len(keys)} keys, but its length is {size}. Its "
            "__len__ must return the number of keys that __iter__ yields."
        )
    return keys[:size]


def is_plain_shuffle(sampler: Any) -> bool:
    """Return whether a sampler is the PyTorch shuffle of all samples, or of very many."""
    if type(sampler) is not RandomSampler:
        return False
    size = len(sampler.data_source)
    return size > MAX_EAGER_ORDER or (not sampler.replacement and sampler.num_samples == size)


def pick_keys(order: Order, start: int, stop: int) -> list[Any]:
    if order is None:
        return list(range(start, stop))
    keys = order[start:stop]
    return keys.tolist() if isinstance(keys, torch.Tensor) else keys


def sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the loader's sampler, or the user's batch sampler."""
    return loader.batch_sampler if makes_own_batches(loader) else loader.sampler


def makes_own_batches(loader: DataLoader[Any]) -> bool:
    """Return whether a loader reads an IterableDataset or has a user-defined batch sampler."""
    if isinstance(loader.dataset, IterableDataset):
        return True
    batches: Any = loader.batch_sampler
    # If a batch sampler is passed, PyTorch sets batch_size to None and sampler to a dummy.
    return batches is not None and (type(batches) is not BatchSampler or loader.batch_size is None)


def nested_datasets(data: Any) -> list[Any]:
    """Return a data set, and all data sets that its attributes refer to."""
    found = {id(data): data}
    unread = [data]
    while unread:
        own = getattr(unread.pop(), "__dict__", {})  # a property may open files
        inner = own.get("datasets")
        for dataset in (own.get("dataset"), *(inner if isinstance(inner, list) else ())):
            if dataset is not None and id(dataset) not in found:
                found[id(dataset)] = dataset
                unread.append(dataset)
    return [*found.values()]


class EpochOrder:
    """The order of the loader's samples, for the newest epoch that was read.

    The sampler, the seed, and the epoch determine it. Workers draw it without communication, and
    `agree` finds those whose sampler draws another one.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        sampler = sampler_of(loader)
        if type(sampler) is DistributedSampler and len(sampler) > MAX_EAGER_ORDER:  # it lists all
            kind: Any = RandomSampler if sampler.shuffle else SequentialSampler
            sampler = kind(sampler.dataset)
        self.sampler, self._loader = sampler, loader
        self.seed = 0
        self._drawn: tuple[int, int, int] | None = None  # seed, epoch, and length of the order
        self._order: Order = None
        self._digest: int | None = None  # of the order, once it is known
        self._have_agreed = False

    @property
    def shuffles(self) -> bool:
        sampler = self.sampler
        if isinstance(sampler, SequentialSampler | RandomSampler | DistributedSampler):
            return bool(getattr(sampler, "shuffle", isinstance(sampler, RandomSampler)))
        memo: dict[int, Any] = {}  # what the copy does not copy: data, and no random generators
        for data in nested_datasets(self._loader.dataset):
            values = getattr(data, "__dict__", {}).values()
            memo |= {id(value): value for value in values if hasattr(type(value), "__len__")}
            memo[id(data)] = data
        with contextlib.suppress(Exception):  # the user's object may count its epochs
            sampler = copy.deepcopy(sampler, memo)
        return len({repr(draw_order(sampler, seed)) for seed in range(3)}) > 1

    def draw(self, epoch: int) -> Order:
        """Return the order of an epoch. Draw it unless it is the newest one."""
        if not self.is_drawn(epoch):
            set_loader_epoch(self.sampler, epoch)
            self._set(epoch, draw_order(self.sampler, self.seed + epoch))
        return self._order

    def is_drawn(self, epoch: int) -> bool:
        """Return whether the order of an epoch is drawn."""
        return self._drawn == (self.seed, epoch, len(self.sampler))

    def _set(self, epoch: int, order: Order) -> None:
        self._drawn, self._order = (self.seed, epoch, len(self.sampler)), order
        self._digest = None

    def digest(self, epoch: int) -> int | None:
        """Return a number that identifies the order of an epoch.

        Return None if seed and epoch determine the order, so that all workers agree.
        """
        if type(self.sampler) is SequentialSampler:
            return None
        if is_plain_shuffle(self.sampler):  # the seed and the epoch determine the order
            return None if self._loader.generator is None else self.seed
        order = self.draw(epoch)
        if self._digest is None:  # keys without their own `repr` never compare equal
            self._digest = int(hashlib.sha256(repr(order).encode()).hexdigest()[:15], 16)
        return self._digest

    def _order_id(self, epoch: int) -> int:
        """Return a number that identifies the order of an epoch in a state, with its seed."""
        digest = self.digest(epoch)
        # The `repr` of an object without its own differs in another process.
        if digest is None or " at 0x" in repr(pick_keys(self.draw(epoch), 0, 1)):
            return zlib.crc32(type(self.sampler).__name__.encode())
        return digest

    def order_id_to_save(self, epoch: int, saved: Mapping[str, Any]) -> int | None:
        """Return the order ID of an epoch to save. Before the order is drawn, it is unchanged."""
        return self._order_id(epoch) if self.is_drawn(epoch) else saved.get("order")

    def check_saved(self, epoch: int, saved: Mapping[str, Any]) -> None:
        """Raise RuntimeError if an epoch has another order than a `BatchSource.resume_info`."""
        if saved.get("epoch") == epoch and saved.get("order") not in (None, self._order_id(epoch)):
            raise RuntimeError(
                f"Training cannot continue in epoch {epoch}: {type(self.sampler).__name__} gives "
                "another order than when the state was saved, and samples would repeat. Use the "
                "same sampler, and take the number of the epoch from set_epoch(epoch), which "
                "raysgd calls. Or continue from a checkpoint of the end of an epoch."
            )

    def agree(self, epoch: int, rank: int, size: int, collectives: Collectives) -> None:
        """Make all workers use one order, because a user's sampler or generator may differ.

        Raises:
            RuntimeError: If the orders have differed from the beginning.
        """
        if size == 1:
            self.draw(epoch)
            self._have_agreed = True  # also for workers that join later with new samplers
            return
        was_drawn = self.is_drawn(epoch)
        if (digest := self.digest(epoch)) is None:
            return
        if not collectives.all_ranks_equal(digest):
            if not collectives.any_rank(self._have_agreed):
                raise RuntimeError(
                    f"{type(self.sampler).__name__} gives the workers different orders of "
                    f"epoch {epoch}. Give its generator the same seed on all workers, or draw "
                    "from the global generators of torch, numpy, or random. If the sampler selects "
                    "the samples of its worker, pass add_dist_sampler=False to the trainer, or "
                    "give it an attribute num_replicas."
                )
            # A worker has joined since, and its sampler has drawn less often.
            src = collectives.all_reduce_min(rank if was_drawn else size)[0] % size
            self._set(epoch, collectives.broadcast(lambda: self.draw(epoch), src))
        self._have_agreed = True
