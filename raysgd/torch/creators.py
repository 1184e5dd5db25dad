"""Operators from creator functions, as in the oldest scripts."""

from collections.abc import Callable
from typing import Any

from torch.nn.modules.loss import _Loss

from raysgd.loop.creators import Creators


class TorchCreators(Creators):
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

    def setup(self, config: dict[str, Any]) -> None:
        models = self._model_creator(config)
        optimizers = self._optimizer_creator(models, config)
        created = {"models": models, "optimizers": optimizers}
        if self._loss_creator is not None:
            creator = self._loss_creator
            is_loss = isinstance(creator, type) and issubclass(creator, _Loss)
            created["criterion"] = creator() if is_loss else creator(config)
        if self._scheduler_creator is not None:
            created["schedulers"] = self._scheduler_creator(optimizers, config)
        created = {name: value for name, value in created.items() if value is not None}
        self.criterion = None
        for name, value in zip(created, self.register(**created), strict=True):
            setattr(self, name, value)
            is_list = isinstance(value, list | tuple)
            setattr(self, name.removesuffix("s"), value[0] if is_list else value)
        self._create_data(config)
