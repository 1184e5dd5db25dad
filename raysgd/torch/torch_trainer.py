"""Import path of the trainer and its Trainable in older scripts."""

import importlib
from typing import Any

from raysgd.torch.trainer import TorchTrainer

__all__ = ["TorchTrainer"]


def __getattr__(name: str) -> Any:
    if name != "BaseTorchTrainable":  # needs Ray Tune
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("raysgd.tune").BaseTorchTrainable
