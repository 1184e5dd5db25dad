"""The class-based family for TensorFlow. Importing it does not import TensorFlow."""

import importlib
from typing import Any

from raysgd.tf.operator import TrainingOperator
from raysgd.tf.trainer import TFTrainer

__all__ = ["TFTrainer", "TrainingOperator"]


def __getattr__(name: str) -> Any:
    if name != "TFTrainable":  # not in __all__, since it needs Ray Tune
        raise AttributeError(f"module 'raysgd.tf' has no attribute {name!r}")
    return importlib.import_module("raysgd.tune").TFTrainable
