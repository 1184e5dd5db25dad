"""The state of a worker: copies of it for the driver, and checks of one that shall be loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raysgd._internal.nested import map_leaves
from raysgd.errors import CheckpointError
from raysgd.loop.train_state import TrainState

__all__ = ["Snapshots", "check_parts", "check_position", "compare_steps"]

logger = logging.getLogger(__name__)


class Snapshots:
    """Holds the newest copy of one worker's state, for the case that all workers are lost.

    It is copied on the device, at a step boundary and in the thread that trains; bringing it to
    the CPU and to the driver happens in another thread while training goes on.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._every = state.settings.options.elastic.snapshot_every
        # epoch, committed steps and state
        self._held: tuple[int, int, dict[str, Any]] | None = None

    @property
    def each_step(self) -> bool:
        """Whether to ask after each step, not only at the start of a segment."""
        return isinstance(self._every, int)

    @property
    def step(self) -> int | None:
        """Committed steps of the newest copy; None where there is none."""
        held = self._held
        return None if held is None else held[1]

    def maybe_take(self, state: Callable[[], dict[str, Any]]) -> None:
        """Take a copy of what `state` returns if it is time for one.

        One rank holds it for all, but for what is divided: all take a copy of that, at the same
        step, and none while some of them are a step ahead.
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
                "There is no memory for a copy of the state, to which training would go back if "
                "all workers were lost; it goes on without (step %d): %s",
                step,
                repr(error),
            )

    def clear(self) -> None:
        """Forget the copy: training has gone to another state, or it is divided anew."""
        self._held = None

    def get(self) -> dict[str, Any] | None:
        """Return the newest copy on CPU. Called from another thread."""
        held = self._held
        return None if held is None else self._state.to_cpu(held[2])


def check_position(state: Mapping[str, Any]) -> None:
    """Check the counts of epochs and steps in a state.

    Raises:
        CheckpointError: if one of them is no count.
    """
    data = state.get("data") or {}
    counts = {"epoch": state.get("epoch"), "global_step": state.get("global_step", 0)}
    if not isinstance(data, Mapping):
        raise CheckpointError(f"The state's data must be a dict of counts, but it is {data!r}.")
    if data:
        for key in ("epoch", "offset"):
            counts[f"data[{key!r}]"] = data.get(key)
        counts["data['validation_offset']"] = data.get("validation_offset", 0)
        for key in data.keys() & {"global_batch", "num_workers"}:
            counts[f"data[{key!r}]"] = data[key]
        seeds = data.get("loader_seeds", {})
        if not isinstance(seeds, Mapping):
            raise CheckpointError(
                f"The state's data['loader_seeds'] must be a dict of counts, but it is {seeds!r}."
            )
        counts["data['split']"] = data.get("split", 1)
        if counts["data['split']"] == 0:
            raise CheckpointError("The state's data['split'] must be at least 1.")
        if "seed" in data:
            counts["data['seed']"] = data["seed"]
        if not isinstance(data.get("trains_on", ""), str):
            raise CheckpointError(
                f"The state's data['trains_on'] must be a name, but it is {data['trains_on']!r}."
            )
        counts |= {f"data['loader_seeds'][{name!r}]": seed for name, seed in seeds.items()}
    for key, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**62:
            raise CheckpointError(f"The state's {key} must be a count, but it is {value!r}.")


def compare_steps(state: TrainState, position: Mapping[str, Any]) -> None:
    """Log if the steps of a loaded state had another size than they have now."""
    now, workers = state.data.global_batch, state.settings.options.num_workers
    then, workers_then = position.get("global_batch"), position.get("num_workers")
    changed = now is not None and (then, workers_then) != (now, workers)
    if not changed or state.settings.full_size is None or state.context.world_rank != 0:
        return
    if then is None:
        logger.info(
            "The state does not say for steps of how many samples it was made, as an earlier "
            "version wrote it; steps have %d samples now.",
            now,
        )
    elif then == now:
        logger.info(
            "The state was made with num_workers=%s and is loaded with num_workers=%d; steps "
            "have %d samples as before.",
            workers_then,
            workers,
            now,
        )
    else:
        logger.warning(
            "The state was made with steps of %d samples (num_workers=%s), and steps have %d "
            "samples now (num_workers=%d): an epoch has another number of them, and schedulers "
            "that count steps end elsewhere. To go on as before, register loaders with "
            "config[BATCH_SIZE] and pass config={BATCH_SIZE: %d}.",
            then,
            workers_then,
            now,
            workers,
            then,
        )


def check_parts(
    name: str, objects: Sequence[Any], saved: Any, problem_of: Callable[[Any, Any], str]
) -> None:
    """Check the states of all registered models, optimizers or schedulers.

    Args:
        name: which of them.
        objects: what is registered.
        saved: what the state has for them.
        problem_of: says why an object cannot take a state; nothing if it can.
    """
    if not isinstance(saved, list | tuple) or not all(isinstance(s, Mapping) for s in saved):
        raise CheckpointError(f"The state's {name!r} must be a list of state dicts.")
    if len(saved) != len(objects):
        raise CheckpointError(
            f"The state has {len(saved)} {name}, and the operator registered {len(objects)}."
        )
    for index, (own, state) in enumerate(zip(objects, saved, strict=True)):
        if problem := problem_of(own, state):
            raise CheckpointError(
                f"The state is of another trainer: its {name}[{index}] does not fit the registered "
                f"{type(own).__name__}: {problem}."
            )
