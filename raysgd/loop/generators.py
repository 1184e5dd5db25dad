"""The random number generators of a worker."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from raysgd.errors import CheckpointError

__all__ = ["Generators"]

_NUM_KEYS = 624
"""Of numpy's Mersenne Twister."""


class Generators:
    """Those of Python and NumPy."""

    def state(self) -> dict[str, Any]:
        """Return the states of the generators, as plain data."""
        numpy_state: Any = np.random.get_state(legacy=True)
        return {"python": random.getstate(), "numpy": numpy_state}

    def set(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned; tuples and arrays may have become other sequences."""
        version, internal, gauss = state["python"]
        if not isinstance(gauss, float | None):  # Python would say so when it is drawn
            raise TypeError(f"The state of Python's generator has {gauss!r}, which is no number.")
        random.setstate((version, tuple(internal), gauss))
        kind, keys, place, *rest = state["numpy"]
        if not 0 <= place <= _NUM_KEYS:  # numpy takes any, and reads there
            raise ValueError(f"The state of numpy's generator has place {place!r}.")
        np.random.set_state((kind, np.asarray(keys, np.uint32), place, *rest))

    def checked(self, generators: Any, num_workers: int) -> Sequence[Mapping[str, Any]]:
        """Return the states of all workers' generators, if there is one for each worker.

        Raises:
            CheckpointError: if one of them cannot be loaded. To find out, it is loaded.
        """
        own = self.state()
        try:
            if not isinstance(generators, list | tuple):
                raise TypeError(f"it is {generators!r}")
            if len(generators) != num_workers:
                return ()
            for state in generators:
                self.set(state)
        except Exception as error:
            raise CheckpointError(
                "The state's data['rng'] must be the states of the workers' random number "
                f"generators: {error!r}"
            ) from error
        finally:
            self.set(own)
        return cast(Sequence[Mapping[str, Any]], generators)

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Return a context after which the generators have the state that they had before."""
        own = self.state()
        try:
            yield
        finally:
            self.set(own)
