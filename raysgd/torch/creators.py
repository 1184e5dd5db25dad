"""Operators from creator functions, the way in which the oldest scripts are written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from raysgd.torch.operator import TrainingOperator

__all__ = ["CreatorOperator", "creator_operator"]


class CreatorOperator(TrainingOperator):
    """An operator whose parts come from functions of the config.

    ``TrainingOperator.from_creators`` makes a subclass of it with the functions filled in; a
    subclass may override ``train_batch`` and the like.
    """

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
        if creators._scheduler_creator is not None:
            given["schedulers"] = creators._scheduler_creator(optimizers, config)
        if creators._loss_creator is not None:
            given["criterion"] = _loss(creators._loss_creator, config)
        names = [
            name for name in ("models", "optimizers", "criterion", "schedulers") if name in given
        ]
        registered = dict(zip(names, self.register(**given), strict=True))
        self._models = _listed(registered["models"])
        self._optimizers = _listed(registered["optimizers"])
        self._schedulers = _listed(registered.get("schedulers", []))
        self._criterion = registered.get("criterion")
        if creators._data_creator is not None:
            self._register_created_data(creators._data_creator, config)

    def _register_created_data(
        self, data_creator: Callable[..., Any], config: dict[str, Any]
    ) -> None:
        if type(self)._serialize_data_creation:
            # workers of one node would download to the same files at the same time
            user = os.getuid() if hasattr(os, "getuid") else 0
            with FileLock(Path(tempfile.gettempdir()) / f"raysgd-data-{user}.lock"):
                loaders = data_creator(config)
        else:
            loaders = data_creator(config)
        if not isinstance(loaders, tuple | list):
            loaders = (loaders,)
        if len(loaders) > 2:
            raise ValueError(
                f"data_creator returned {len(loaders)} loaders; it must return a train loader, or "
                "a train loader and a validation loader."
            )
        names = ("train_loader", "validation_loader")
        self.register_data(**dict(zip(names, loaders, strict=False)))

    @property
    def model(self) -> Any:
        """The first or only model."""
        return self._models[0]

    @property
    def models(self) -> list[Any]:
        """All models."""
        return self._models

    @property
    def optimizer(self) -> Any:
        """The first or only optimizer."""
        return self._optimizers[0]

    @property
    def optimizers(self) -> list[Any]:
        """All optimizers."""
        return self._optimizers

    @property
    def criterion(self) -> Any:
        """The loss; None without a ``loss_creator``."""
        return self._criterion

    @property
    def scheduler(self) -> Any:
        """The first or only scheduler; None without a ``scheduler_creator``."""
        return self._schedulers[0] if self._schedulers else None

    @property
    def schedulers(self) -> list[Any]:
        """All schedulers."""
        return self._schedulers


def creator_operator(
    base: type[TrainingOperator],
    model_creator: Callable[..., Any],
    optimizer_creator: Callable[..., Any],
    data_creator: Callable[..., Any] | None,
    loss_creator: Callable[..., Any] | type | None,
    scheduler_creator: Callable[..., Any] | None,
    serialize_data_creation: bool,
) -> type[CreatorOperator]:
    """Make a subclass of `base` and CreatorOperator, see ``TrainingOperator.from_creators``."""
    optional = {
        "data_creator": data_creator,
        "loss_creator": loss_creator,
        "scheduler_creator": scheduler_creator,
    }
    required = {"model_creator": model_creator, "optimizer_creator": optimizer_creator}
    given = {**required, **{name: f for name, f in optional.items() if f is not None}}
    for name, function in given.items():
        if not callable(function):
            raise TypeError(
                f"from_creators({name}=...) must be a function, but it is {function!r}."
            )
    bases = (CreatorOperator,) if issubclass(CreatorOperator, base) else (base, CreatorOperator)
    if issubclass(base, CreatorOperator):
        bases = (base,)
    functions: dict[str, Any] = {
        # static: a plain function among the attributes of a class would become a method
        f"_{name}": staticmethod(function)
        for name, function in given.items()
    }
    functions["_serialize_data_creation"] = serialize_data_creation
    return type("CustomCreatorOperator", bases, functions)


def _loss(creator: Any, config: dict[str, Any]) -> Any:
    """Return the loss: of a loss class an instance, of a creator what it returns."""
    if isinstance(creator, type) and issubclass(creator, torch.nn.modules.loss._Loss):
        return creator()
    return creator(config)


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]
