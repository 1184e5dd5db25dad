"""The random number generators that checkpoints restore."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from raysgd.errors import CheckpointError


class Generators:
    """The random number generators of Python and NumPy. Subclasses add framework generators."""

    def state(self) -> dict[str, Any]:
        numpy_state: Any = np.random.get_state(legacy=True)
        return {"python": random.getstate(), "numpy": numpy_state}

    def set(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state`. Accept other sequences in place of tuples and arrays."""
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
        kind, keys, place, *rest = state["numpy"]
        if not 0 <= place <= len(keys):  # NumPy would read beyond the keys
            raise ValueError(f"NumPy generator: position {place} must be from 0 to {len(keys)}.")
        np.random.set_state((kind, np.asarray(keys, np.uint32), place, *rest))

    def check(self, states: Any, num_workers: int) -> Sequence[Mapping[str, Any]]:
        """Check the states of all workers. Return () if the number of workers has changed."""
        try:
            with self.preserving():
                for state in states:
                    self.set(state)
        except Exception as error:
            raise CheckpointError(
                f"The state's data['rng'] cannot be loaded: {error!r}. It must have the random "
                "number generators of each worker."
            ) from error
        return states if len(states) == num_workers else ()

    @contextlib.contextmanager
    def preserving(self) -> Iterator[None]:
        own = self.state()
        try:
            yield
        finally:
            self.set(own)
