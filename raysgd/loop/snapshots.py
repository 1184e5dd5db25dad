"""Copies of the state that the driver fetches, for the case that all workers are lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from raysgd.loop.registration import Registration
from raysgd.trees import map_leaves

__all__ = ["Snapshots", "full_state"]


class Snapshots:
    """Holds the newest copy of one worker's state.

    It is copied on the device, at a step boundary and in the thread that trains; bringing it to
    the CPU and to the driver happens in another thread while training goes on.
    """

    def __init__(self, every: Literal["epoch"] | int | None) -> None:
        self._every = every
        self._held: tuple[int, dict[str, Any]] | None = None
        self._epoch = -1
        self._to_cpu: Callable[[Any], Any] = _as_it_is

    @property
    def each_step(self) -> bool:
        """Whether to ask after each step, not only at the start of a segment."""
        return isinstance(self._every, int)

    @property
    def step(self) -> int | None:
        """Committed steps of the newest copy; None where there is none."""
        held = self._held
        return None if held is None else held[0]

    def maybe_take(
        self,
        registration: Registration,
        operator: Any,
        call_state: Callable[[], dict[str, Any]],
    ) -> None:
        """Take a copy if it is time for one. One rank holds it for all."""
        if self._every is None or registration.settings.context.world_rank != 0:
            return
        if self._held is not None:
            if self._every == "epoch" and registration.epoch == self._epoch:
                return
            if (
                isinstance(self._every, int)
                and registration.global_step - self._held[0] < self._every
            ):
                return
        self._epoch = registration.epoch
        state = {**full_state(registration, operator), "call": call_state()}
        self._held = (registration.global_step, map_leaves(state, registration.copy_leaf))
        self._to_cpu = registration.to_cpu

    def clear(self) -> None:
        """Forget the copy: training has gone to another state."""
        self._held = None

    def get(self) -> dict[str, Any] | None:
        """Return the newest copy on CPU. Called from another thread."""
        held = self._held
        return None if held is None else self._to_cpu(held[1])


def full_state(registration: Registration, operator: Any) -> dict[str, Any]:
    """Return the state in the form that is saved, with tensors as they are on this device."""
    position = registration.position()
    return {
        "epoch": position["epoch"] + (position["offset"] > 0),
        "global_step": registration.global_step,
        "operator": operator.state_dict(),
        **registration.training_state(),
        "data": position,
    }


def _as_it_is(tree: Any) -> Any:
    return tree
