"""The orders that samplers draw in an epoch."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import RandomSampler, SequentialSampler

Order = torch.Tensor | list[Any] | None
"""Order of an epoch: indices or other keys of a sampler. None means the order of the data set."""


@contextlib.contextmanager
def seeded(seed: int, generator: Any = None) -> Iterator[None]:
    """Seed the global generators and a PyTorch `generator`.

    Restore them at the end of the context.
    """
    # torch.manual_seed would reseed the GPUs as well.
    own = [generator] if isinstance(generator, torch.Generator) else []
    generators: list[torch.Generator] = [torch.default_generator, *own]
    held = random.getstate(), np.random.get_state(), [g.get_state() for g in generators]
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        for each in generators:
            each.manual_seed(seed)
        yield
    finally:
        random.setstate(held[0])
        np.random.set_state(held[1])
        for each, state in zip(generators, held[2], strict=True):
            each.set_state(state)


def drawn_order(sampler: Any, seed: int) -> Order:
    """Return the order that a sampler draws if all random numbers follow from `seed`."""
    if type(sampler) is SequentialSampler:
        return None
    with seeded(seed, getattr(sampler, "generator", None)):
        if is_plain_shuffle(sampler):
            return torch.randperm(len(sampler.data_source))
        # Stop an endless sampler at its length.
        return list(itertools.islice(sampler, len(sampler)))


def is_plain_shuffle(sampler: Any) -> bool:
    """Return whether a sampler is the PyTorch shuffle of all samples."""
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )


def picked(order: Order, start: int, stop: int) -> list[Any]:
    if order is None:
        return list(range(start, stop))
    keys = order[start:stop]
    return keys if isinstance(keys, list) else keys.tolist()
