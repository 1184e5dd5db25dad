"""The random number generators of a worker."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from raysgd.errors import CheckpointError

__all__ = ["Generators"]


class Generators:
    """The generators of Python and NumPy. Subclasses add those of a framework."""

    def state(self) -> dict[str, Any]:
        """Return the states of the generators, as plain data."""
        numpy_state: Any = np.random.get_state(legacy=True)
        return {"python": random.getstate(), "numpy": numpy_state}

    def set(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state`. Its tuples and arrays may have become other sequences."""
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
        kind, keys, place, *rest = state["numpy"]
        if not 0 <= place <= len(keys):  # NumPy would read beyond the keys
            raise ValueError(f"The position {place} is not in 0..{len(keys)}.")
        np.random.set_state((kind, np.asarray(keys, np.uint32), place, *rest))

    def checked(self, states: Any, num_workers: int) -> Sequence[Mapping[str, Any]]:
        """Return the states of all workers, or nothing if their number differs.

        Raises:
            CheckpointError: If a state cannot be loaded.
        """
        try:
            with self.unchanged():
                for state in states:
                    self.set(state)
        except Exception as error:
            raise CheckpointError(
                f"The state's data['rng'] cannot be loaded: {error!r}. It must have the random "
                "number generators of each worker."
            ) from error
        return states if len(states) == num_workers else ()

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore the states of the generators at the end of the context."""
        own = self.state()
        try:
            yield
        finally:
            self.set(own)
