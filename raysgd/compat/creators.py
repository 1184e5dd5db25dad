"""Operators from creator functions, as in the oldest scripts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from raysgd._internal.files import lock_of_node


def creator_class(
    caller: str, bases: tuple[type, ...], creators: Mapping[str, Any], required: Collection[str]
) -> Any:
    """Return an operator class that holds the creators as ``_model_creator`` and so on."""
    for name, function in creators.items():
        if not callable(function) and (function is not None or name in required):
            raise TypeError(f"{caller}({name}=...) must be a function, but it is {function!r}.")
    # A plain function in a class would become a method.
    functions = {f"_{name}": staticmethod(f) for name, f in creators.items() if f is not None}
    return type("CustomCreatorOperator", bases, functions)


class _Creators:
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


class TorchCreators(_Creators):
    """The methods of `raysgd.torch.CreatorOperator`."""

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

    _optimizer_creator: Callable[..., Any]
    _loss_creator: Callable[..., Any] | type | None = None
    _scheduler_creator: Callable[..., Any] | None = None
    _serialize_data_creation = True

    def setup(self, config: dict[str, Any]) -> None:
        models = self._model_creator(config)
        optimizers = self._optimizer_creator(models, config)
        created = {"models": models, "optimizers": optimizers}
        if self._loss_creator is not None:
            created["criterion"] = _loss(self._loss_creator, config)
        if self._scheduler_creator is not None:
            created["schedulers"] = self._scheduler_creator(optimizers, config)
        created = {name: value for name, value in created.items() if value is not None}
        self.criterion = None
        for name, value in zip(created, self.register(**created), strict=True):
            setattr(self, name, value)
            is_list = isinstance(value, list | tuple)
            setattr(self, name.removesuffix("s"), value[0] if is_list else value)
        self._create_data(config)


def _loss(creator: Any, config: dict[str, Any]) -> Any:
    from torch.nn.modules.loss import _Loss

    is_loss = isinstance(creator, type) and issubclass(creator, _Loss)
    return creator() if is_loss else creator(config)


def check_creators(operator_cls: type[Any]) -> None:
    """Raise TypeError for a `CreatorOperator` without creators."""
    if issubclass(operator_cls, TorchCreators) and not hasattr(operator_cls, "_model_creator"):
        raise TypeError(
            f"{operator_cls.__name__} has no creators. Pass the result of "
            f"{operator_cls.__name__}.from_creators(model_creator, optimizer_creator, ...)."
        )


class KerasCreators(_Creators):
    """The methods of an operator whose creators return a compiled model and data sets."""

    def setup(self, config: dict[str, Any]) -> None:
        weights = (config.get("fit_config") or {}).get("class_weight")
        self.model, self.optimizer, *_ = self.register(
            self._model_creator(config), class_weight=weights
        )
        self._create_data(config)
