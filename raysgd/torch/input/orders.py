"""The orders that samplers draw in an epoch."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, RandomSampler, SequentialSampler

from raysgd.data.stream import Keys
from raysgd.loop.generators import Generators

HUGE = 2**24
"""Number of samples above which a shuffled order is computed where it is read."""


class HugeOrder:
    """A shuffled order of many samples that needs no memory and no time for the whole epoch.

    A Feistel network permutes the numbers of an even number of bits. Numbers that are too large are
    permuted again until they fit (cycle walking). Places after the size have further orders. See
    Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002.
    """

    def __init__(self, size: int, replaces: bool) -> None:
        self._size, self._replaces = size, replaces
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._keys = torch.randint(2**62, (8,)).tolist()

    def __getitem__(self, part: slice) -> list[int]:
        return [self._at(place) for place in range(part.start, part.stop)]

    def _at(self, place: int) -> int:
        if self._replaces:  # random numbers, which repeat
            return hash((place, *self._keys)) % self._size
        (turn, index), mask = divmod(place, self._size), (1 << self._half) - 1
        while True:
            left, right = index >> self._half, index & mask
            for key in self._keys:
                left, right = right, left ^ (hash((right, key + turn)) & mask)
            if (index := left << self._half | right) < self._size:
                return index


Order = torch.Tensor | list[Any] | HugeOrder | Keys | None
"""Order of an epoch: indices or other keys of a sampler. None means the order of the data set."""


@contextlib.contextmanager
def seeding(seed: int, generator: Any = None) -> Iterator[None]:
    """Seed the global generators and a PyTorch `generator`.

    Restore them at the end of the context.
    """
    own = generator if isinstance(generator, torch.Generator) else torch.Generator()
    before = own.get_state()
    with Generators().preserving(), torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        for each in (torch.default_generator, own):  # torch.manual_seed would reseed GPUs as well
            each.manual_seed(seed)
        try:
            yield
        finally:
            own.set_state(before)


def seed_all(seed: int) -> None:
    """Seed the global generators of torch, NumPy, and random."""
    # On a CPU, torch.manual_seed takes 0.2 ms, and keeps a stack for each device that may follow.
    torch.default_generator.manual_seed(seed % 2**63)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed % 2**63)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def drawn_order(sampler: Any, seed: int) -> Order:
    """Return the order that a sampler draws if all random numbers follow from `seed`."""
    if type(sampler) is SequentialSampler:
        return None
    with seeding(seed, getattr(sampler, "generator", None)):
        if is_plain_shuffle(sampler):
            size = len(sampler.data_source)
            return torch.randperm(size) if size <= HUGE else HugeOrder(size, sampler.replacement)
        # Stop an endless sampler after its length. Let others end, and perhaps count their epochs.
        size = len(sampler)
        return list(itertools.islice(sampler, size + 1))[:size]


def is_plain_shuffle(sampler: Any) -> bool:
    """Return whether a sampler is the PyTorch shuffle of all samples, or of very many."""
    if type(sampler) is not RandomSampler:
        return False
    size = len(sampler.data_source)
    return size > HUGE or (not sampler.replacement and sampler.num_samples == size)


def pick_keys(order: Order, start: int, stop: int) -> list[Any]:
    if order is None:
        return list(range(start, stop))
    keys = order[start:stop]
    return keys.tolist() if isinstance(keys, torch.Tensor) else keys


def have_own_repr(order: Order) -> bool:
    """Return whether the `repr` of the keys is the same in another process."""
    return " at 0x" not in repr(pick_keys(order, 0, 1))


def other_order_error(sampler: Any, epoch: int) -> RuntimeError:
    return RuntimeError(
        f"Training cannot continue in epoch {epoch}: {type(sampler).__name__} gives another order "
        "than when the state was saved, and samples would repeat. Use the same sampler, and take "
        "the number of the epoch from set_epoch(epoch), which raysgd calls. Or continue from a "
        "checkpoint of the end of an epoch."
    )


class IndexSampler:
    """A sampler of this worker's part of an epoch, which `begin` sets."""

    def __init__(self, flat: bool) -> None:
        self._flat = flat

    def begin(
        self, order: Order, spans: Iterator[tuple[int, int]], seeds: tuple[int, int] | None = None
    ) -> None:
        """Begin an epoch. If `seeds` are given, they and the position precede each index."""
        self._order, self._spans, self._seeds = order, spans, seeds

    def __iter__(self) -> Iterator[Any]:
        batches = (self._batch(*span) for span in self._spans)
        return itertools.chain.from_iterable(batches) if self._flat else batches

    def _batch(self, start: int, stop: int) -> Any:
        keys = pick_keys(self._order, start, stop)
        if self._seeds is None:
            return keys
        return [((*self._seeds, start + number), key) for number, key in enumerate(keys)]


class SeededSamples(Dataset[Any]):
    """A data set whose random numbers follow from the seed, the epoch, and the position in it.

    Its indices are pairs of these seeds and the index, because loader processes have copies of this
    object. Attributes are those of the user's data set.
    """

    __getitems__ = None  # PyTorch would call the method of the user's data set

    def __init__(self, data: Any) -> None:
        vars(self)["_data"] = data

    def __getitem__(self, key: tuple[tuple[int, ...], Any]) -> Any:
        seeds, index = key
        seed_all(hash(seeds))
        return self._data[index]

    def __len__(self) -> int:
        return len(self._data)

    def __getattr__(self, name: str) -> Any:
        if name == "_data":  # the attribute is missing while unpickling
            raise AttributeError(name)
        return getattr(self._data, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._data, name, value)
