"""Operators made from creator functions, as in the oldest scripts."""

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
from raysgd.loop.registered import listed


class CreatorMethods:
    """The methods of `CreatorOperator`, which derives from ``TrainingOperator`` too."""

    if TYPE_CHECKING:
        register: Callable[..., Any]
        register_data: Callable[..., None]

    models: Any
    """Result of the ``model_creator``: a model, or a list or tuple of models."""
    model: Any
    optimizers: Any
    optimizer: Any
    criterion: Any
    """The loss. None without a ``loss_creator``."""
    schedulers: Any
    """Result of the ``scheduler_creator``. Not set without a creator."""
    scheduler: Any

    _model_creator: Callable[..., Any]
    _optimizer_creator: Callable[..., Any]
    _data_creator: Callable[..., Any] | None = None
    _loss_creator: Callable[..., Any] | type | None = None
    _scheduler_creator: Callable[..., Any] | None = None
    _serialize_data_creation = True

    def setup(self, config: dict[str, Any]) -> None:
        creators = type(self)
        models = creators._model_creator(config)
        optimizers = creators._optimizer_creator(models, config)
        given: dict[str, Any] = {"models": models, "optimizers": optimizers}
        if creators._loss_creator is not None:
            given["criterion"] = _loss(creators._loss_creator, config)
        if creators._scheduler_creator is not None:
            given["schedulers"] = creators._scheduler_creator(optimizers, config)
        given = {name: value for name, value in given.items() if value is not None}
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
    base: type[Any],
    own: type[Any],
    creators: Mapping[str, Any],
    serialize_data_creation: bool,
) -> type[Any]:
    bases = mixed_bases(base, own)
    required = ("model_creator", "optimizer_creator")
    made: type[Any]
    made = class_from_creators("from_creators", bases, creators, required)
    made._serialize_data_creation = serialize_data_creation
    return made


def mixed_bases(base: type, own: type) -> tuple[type, ...]:
    """Return the bases of a class that derives from both."""
    if issubclass(base, own):
        return (base,)
    return (own,) if issubclass(own, base) else (base, own)


def lock_of_node() -> contextlib.AbstractContextManager[Any]:
    """Return a lock that prevents workers of one node from downloading to the same files."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    return FileLock(Path(tempfile.gettempdir()) / f"raysgd-data-{user}.lock")


def _loss(creator: Any, config: dict[str, Any]) -> Any:
    if isinstance(creator, type) and issubclass(creator, torch.nn.modules.loss._Loss):
        return creator()
    return creator(config)
