"""Import path of the trainer and its Trainable in older scripts."""

import importlib
from typing import Any

from raysgd.tf.trainer import TFTrainer

__all__ = ["TFTrainer"]


def __getattr__(name: str) -> Any:
    if name != "TFTrainable":  # not in __all__, since it needs Ray Tune
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("raysgd.tune").TFTrainable
