"""The interface of a training state for checkpoints, snapshots, and new workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class SavedState(ABC):
    """What a training state saves, loads, and sends to other workers."""

    @abstractmethod
    def user_settings(self) -> Any:
        """Return values that user code may set between steps, such as learning rates."""

    def flags(self) -> Any:
        """Return what user code may set on models and no state dict has, for new workers."""
        return None

    def set_flags(self, flags: Any) -> None:  # noqa: B027
        """Apply the result of `flags`."""

    @abstractmethod
    def training_state(self) -> dict[str, Any]:
        """Return models, optimizers, and the state of features. Tensors stay on their device."""

    @abstractmethod
    def check_training_state(self, state: dict[str, Any]) -> None:
        """Raise CheckpointError if a state does not fit the registered objects."""

    @abstractmethod
    def load_training_state(self, state: dict[str, Any]) -> None:
        """Load the result of `training_state`."""

    def places_of(
        self, state: dict[str, Any], addresses: set[int]
    ) -> tuple[dict[str, Any], dict[int, Any]]:
        """Replace arrays at `addresses` in a state by equal ones of the training state.

        Also return where to write the content of these arrays.
        """
        return state, {}

    @abstractmethod
    def copy_leaf(self, leaf: Any, on_host: bool = False) -> Any:
        """Return a copy of a leaf of a state, on its device or in the memory of the host."""

    @abstractmethod
    def to_cpu(self, state: Any) -> Any:
        """Return a state on the CPU. It is a copy, unless pickling copies it anyway."""
