"""The interface of what reads and loads the registered objects."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raysgd.cluster.large_values import IncomingValue
from raysgd.errors import CheckpointError
from raysgd.loop.train_state import TrainState


class StateAccess(ABC):
    """Reads and loads models, optimizers, and the state of features.

    `read_state` adds the position and what else a file or a snapshot needs.
    """

    def __init__(self, train_state: TrainState) -> None:
        self._train_state = train_state

    @abstractmethod
    def read(self, frozen: bool = True) -> dict[str, Any]:
        """Return the state. Tensors stay on their device, and may share memory with the models.

        Unless `frozen`, leave out the frozen parameters that ``setup`` makes again.
        """

    def read_for_workers(self) -> dict[str, Any]:
        """Return the state without what ``setup`` of all workers has made alike."""
        return self.read()

    @abstractmethod
    def check(self, state: dict[str, Any]) -> None:
        """Raise CheckpointError if a state does not fit the registered objects."""

    @abstractmethod
    def load(self, state: dict[str, Any]) -> None:
        """Load the result of `read`. `StatePlacement.load_shards` loads shards."""

    def copy_from(self, leader_rank: int, follows: bool) -> None:
        """Load the state of the leader if this rank `follows`. Every rank must call it."""
        state = self._train_state.collectives.broadcast(self.read, leader_rank)
        if follows:
            self.load(state)

    @abstractmethod
    def unsharded_models(self, only_weights: bool = False) -> list[Any]:
        """Return copies of the models on rank 0. All ranks with shards must call it."""

    @abstractmethod
    def user_settings(self) -> Any:
        """Return values that user code may set between steps, such as learning rates."""

    def module_modes(self) -> Any:
        """Return the train or eval modes that user code may set in models, for new workers."""
        return None

    def set_module_modes(self, modes: Any) -> None:  # noqa: B027
        """Apply the result of `module_modes`."""

    def reuse_memory(self, state: dict[str, Any], incoming: IncomingValue) -> dict[str, Any]:
        """Replace incoming arrays by registered ones of the same shape, dtype, and device.

        The content of these arrays then arrives in their memory.
        """
        return state


def check_objects(
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
    for index, (owner, state) in enumerate(zip(objects, saved, strict=True)):
        if problem := problem_of(owner, state):
            raise CheckpointError(
                f"The state's {name}[{index}] does not fit the registered {type(owner).__name__}: "
                f"{problem}."
            )
