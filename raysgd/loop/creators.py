"""Operators from creator functions, as in the oldest scripts."""

import contextlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from raysgd._internal.files import lock_of_node


def creator_class(
    caller: str,
    bases: tuple[type, ...],
    creators: Mapping[str, Any],
    required: Collection[str],
    serialize: bool = False,
) -> type[Any]:
    """Return an operator class that holds the creators as ``_model_creator`` and so on."""
    for name, function in creators.items():
        if not callable(function) and (function is not None or name in required):
            raise TypeError(f"{caller}({name}=...) must be a function, but it is {function!r}.")
    # A plain function in a class would become a method.
    own: dict[str, Any] = {f"_{n}": staticmethod(f) for n, f in creators.items() if f is not None}
    return type("CustomCreatorOperator", bases, {**own, "_serialize_data_creation": serialize})


class Creators:
    """What the creators of all frameworks have in common."""

    _model_creator: Callable[..., Any]
    _data_creator: Callable[..., Any] | None = None
    _serialize_data_creation = False
    """Whether the ``data_creator`` runs on one worker of a node at a time."""
    register: Any
    register_data: Any

    def _create_data(self, config: dict[str, Any]) -> None:
        """Register the result of the ``data_creator``."""
        if self._data_creator is None:
            return
        with lock_of_node() if self._serialize_data_creation else contextlib.nullcontext():
            created = self._data_creator(config)
        loaders = created if isinstance(created, tuple | list) else (created,)
        if len(loaders) > 2:
            raise ValueError(
                f"data_creator returned {len(loaders)} loaders; it must return a train loader, or "
                "a train and a validation loader."
            )
        names = ("train_loader", "validation_loader")
        self.register_data(**dict(zip(names, loaders, strict=False)))
