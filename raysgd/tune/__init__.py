"""Ray Tune integration: trainers and functions as trials. Imports Ray on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raysgd.tune.trials import BaseTorchTrainable, BaseTrainable, TFTrainable, trainable_class

__all__ = ["BaseTorchTrainable", "BaseTrainable", "TFTrainable", "trainable_class"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'raysgd.tune' has no attribute {name!r}")
    return getattr(importlib.import_module("raysgd.tune.trials"), name)
