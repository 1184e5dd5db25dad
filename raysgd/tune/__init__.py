"""Trainers as trials of Ray Tune. Imports Ray on first use."""

from typing import TYPE_CHECKING

from raysgd._internal.imports import lazy_names

if TYPE_CHECKING:
    from raysgd.tf.trials import TFTrainable
    from raysgd.trials import BaseTorchTrainable, BaseTrainable, trainable_class

__all__ = ["BaseTorchTrainable", "BaseTrainable", "TFTrainable", "trainable_class"]


_HOMES = {name: f"raysgd.trials:{name}" for name in __all__}
__getattr__ = lazy_names(__name__, _HOMES | {"TFTrainable": "raysgd.tf.trials:TFTrainable"})
