"""The random number generators of a worker that uses PyTorch."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from raysgd.loop.state import Generators


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


class TorchGenerators(Generators):
    def state(self) -> dict[str, Any]:
        state = super().state()
        kind, keys, *rest = state["numpy"]
        # Use a tensor, because `weights_only` loading rejects arrays.
        state["numpy"] = (kind, torch.from_numpy(keys.astype(np.int64)), *rest)
        state["torch"] = torch.get_rng_state()
        if torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def set(self, state: Mapping[str, Any]) -> None:
        super().set(state)
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
