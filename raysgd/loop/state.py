"""A worker's state: snapshots for the driver, random numbers, and checks of a state to load."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from raysgd._internal.nested import map_leaves
from raysgd.errors import CheckpointError
from raysgd.loop.train_state import TrainState


class Snapshots:
    """Holds the newest copy of one worker's state, in case all workers are lost.

    The training thread copies the state on the device. Another thread sends the copy to the driver
    while training continues.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._every = state.settings.options.elastic.snapshot_every
        # The newest copy: its epoch, committed steps, and state.
        self._held: tuple[int, int, dict[str, Any]] | None = None

    @property
    def each_step(self) -> bool:
        """Whether to call `maybe_take` after each step, and not only before each segment."""
        return isinstance(self._every, int)

    @property
    def step(self) -> int | None:
        held = self._held
        return None if held is None else held[1]

    def maybe_take(self, state: Callable[[], dict[str, Any]]) -> None:
        """Copy the result of `state` if a snapshot is due.

        Rank 0 holds the copy. If the state is sharded, every rank copies its shards.
        """
        train_state = self._state
        is_holder = train_state.context.world_rank == 0 or train_state.sharded
        if self._every is None or not is_holder or not train_state.ranks_in_sync:
            return
        epoch, step = train_state.epoch, train_state.global_step
        if self._held is not None:
            held_epoch, held_step, _ = self._held
            due = step - held_step >= self._every if self.each_step else epoch != held_epoch
            if not due:
                return
        try:
            self._held = epoch, step, map_leaves(state(), train_state.copy_leaf)
        except Exception as error:
            if not train_state.parts.is_tolerable(error):
                raise
            train_state.say(
                "snapshot",
                "Memory is too small for a snapshot at step %d: %r. If all workers are lost, "
                "training restarts from an older state.",
                step,
                error,
            )

    def clear(self) -> None:
        """Discard the copy, because the state was replaced or resharded."""
        self._held = None

    def get(self) -> dict[str, Any] | None:
        """Return the newest copy on the CPU. Called from another thread."""
        held = self._held
        return None if held is None else self._state.to_cpu(held[2])


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

    def checked(self, states: Any, num_workers: int) -> Sequence[Mapping[str, Any]]:
        """Check the states of all workers. Return () if the number of workers has changed."""
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
        own = self.state()
        try:
            yield
        finally:
            self.set(own)


def check_position(state: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the epochs, steps, or offsets of a state are not counts."""
    counts = {"epoch": state.get("epoch"), "global_step": state.get("global_step", 0)}
    try:
        if data := state.get("data"):
            optional = ("validation_offset", "seed", "split")
            known = ["epoch", "offset", *(key for key in optional if key in data)]
            counts |= {f"data[{key!r}]": data.get(key) for key in known}
            seeds = data.get("loader_seeds", {})
            counts |= {f"data['loader_seeds'][{name!r}]": seed for name, seed in seeds.items()}
    except (AttributeError, TypeError) as error:
        raise CheckpointError(f"The state's data cannot be loaded: {error!r}.") from error
    for key, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**62:
            raise CheckpointError(f"The state's {key} must be a count, but it is {value!r}.")
    if counts.get("data['split']") == 0:
        raise CheckpointError("The state's data['split'] must be at least 1.")


def check_parts(
    name: str, objects: Sequence[Any], saved: Any, problem_of: Callable[[Any, Any], str]
) -> None:
    """Raise CheckpointError if saved states of models, optimizers, or schedulers do not fit.

    `problem_of` returns why an object cannot load a state, or an empty string.
    """
    if not isinstance(saved, list | tuple) or not all(isinstance(s, Mapping) for s in saved):
        raise CheckpointError(f"The state's {name!r} must be a list of state dicts.")
    if len(saved) != len(objects):
        raise CheckpointError(
            f"The state has {len(saved)} {name}, but the operator registered {len(objects)}."
        )
    for index, (own, state) in enumerate(zip(objects, saved, strict=True)):
        if problem := problem_of(own, state):
            raise CheckpointError(
                f"The state's {name}[{index}] does not fit the registered {type(own).__name__}: "
                f"{problem}."
            )
