"""Random numbers that follow from a seed for a while."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

__all__ = ["seeded"]


@contextlib.contextmanager
def seeded(seed: int, generator: Any = None) -> Iterator[None]:
    """Let every random number that a sampler may draw follow from `seed`, and restore all after.

    Of generators of its own only torch's are known; numpy's, say, cannot be put back.
    """
    # torch.manual_seed would reseed the GPUs as well
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
