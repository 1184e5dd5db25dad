"""Operators from creator functions, the way in which the oldest scripts are written."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock

from raysgd.loop.operator_base import class_from_creators, created_loaders
from raysgd.loop.train_state import listed

if TYPE_CHECKING:
    from raysgd.torch.operator import CreatorOperator, TrainingOperator

    _Base = TrainingOperator
else:  # which imports this module
    _Base = object

__all__ = ["CreatorMethods", "creator_operator", "lock_of_node", "mixed_bases"]


class CreatorMethods(_Base):
    """What `CreatorOperator` adds to the operator."""

    models: Any
    """What the ``model_creator`` made: a model, or a list or tuple of them."""
    model: Any
    optimizers: Any
    optimizer: Any
    criterion: Any
    """The loss; None without a ``loss_creator``."""
    schedulers: Any
    """What the ``scheduler_creator`` made; there is no such attribute without one."""
    scheduler: Any
    """The first or only scheduler, likewise."""

    _model_creator: Callable[..., Any]
    _optimizer_creator: Callable[..., Any]
    _data_creator: Callable[..., Any] | None = None
    _loss_creator: Callable[..., Any] | type | None = None
    _scheduler_creator: Callable[..., Any] | None = None
    _serialize_data_creation = True

    def setup(self, config: dict[str, Any]) -> None:
        """Call the creators and register what they return."""
        creators = type(self)
        models = creators._model_creator(config)
        optimizers = creators._optimizer_creator(models, config)
        given: dict[str, Any] = {"models": models, "optimizers": optimizers}
        if creators._loss_creator is not None:
            given["criterion"] = _loss(creators._loss_creator, config)
        if creators._scheduler_creator is not None:
            given["schedulers"] = creators._scheduler_creator(optimizers, config)
        registered = dict(zip(given, self.register(**given), strict=True))
        self.criterion = None
        for name, value in registered.items():
            setattr(self, name, value)
            setattr(self, name.removesuffix("s"), listed(value)[0])
        if creators._data_creator is not None:
            with lock_of_node() if creators._serialize_data_creation else contextlib.nullcontext():
                loaders = creators._data_creator(config)
            self.register_data(**created_loaders(loaders))


def creator_operator(
    base: type[TrainingOperator],
    own: type[CreatorOperator],
    creators: Mapping[str, Any],
    serialize_data_creation: bool,
) -> type[CreatorOperator]:
    """Make a subclass of `base` and `own`, see ``TrainingOperator.from_creators``."""
    bases = mixed_bases(base, own)
    required = ("model_creator", "optimizer_creator")
    made: type[CreatorOperator]
    made = class_from_creators("from_creators", bases, creators, required)
    made._serialize_data_creation = serialize_data_creation
    return made


def mixed_bases(base: type, own: type) -> tuple[type, ...]:
    """Return the bases of a class that derives from both."""
    if issubclass(base, own):
        return (base,)
    return (own,) if issubclass(own, base) else (base, own)


def lock_of_node() -> contextlib.AbstractContextManager[Any]:
    """Return a lock, since workers of one node would download to the same files at once."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    return FileLock(Path(tempfile.gettempdir()) / f"raysgd-data-{user}.lock")


def _loss(creator: Any, config: dict[str, Any]) -> Any:
    """Return the loss: of a loss class an instance, of a creator what it returns."""
    if isinstance(creator, type) and issubclass(creator, torch.nn.modules.loss._Loss):
        return creator()
    return creator(config)
