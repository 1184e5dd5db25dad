"""The class-based family for TensorFlow. Importing it does not import TensorFlow."""

from raysgd._internal.imports import lazy_names
from raysgd.tf.operator import TrainingOperator
from raysgd.tf.trainer import TFTrainer

__all__ = ["TFTrainer", "TrainingOperator"]

# Not in `__all__`, because it needs Ray Tune.
__getattr__ = lazy_names(__name__, {"TFTrainable": "raysgd.tf.trials:TFTrainable"})
