"""The class-based family for PyTorch."""

import importlib
from typing import Any

from raysgd.torch.creator_operator import CreatorOperator
from raysgd.torch.torch_trainer import TorchTrainer
from raysgd.torch.training_operator import TrainingOperator

__all__ = ["CreatorOperator", "TorchTrainer", "TrainingOperator"]


def __getattr__(name: str) -> Any:
    if name != "BaseTorchTrainable":  # not in __all__, since it needs Ray Tune
        raise AttributeError(f"module 'raysgd.torch' has no attribute {name!r}")
    return importlib.import_module("raysgd.tune").BaseTorchTrainable
