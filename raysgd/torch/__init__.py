"""The class-based family for PyTorch."""

import importlib
from typing import Any

from raysgd.torch.operator import CreatorOperator, TrainingOperator
from raysgd.torch.trainer import TorchTrainer

__all__ = ["CreatorOperator", "TorchTrainer", "TrainingOperator"]


def __getattr__(name: str) -> Any:
    if name != "BaseTorchTrainable":  # needs Ray Tune
        raise AttributeError(f"module 'raysgd.torch' has no attribute {name!r}")
    return importlib.import_module("raysgd.tune").BaseTorchTrainable
