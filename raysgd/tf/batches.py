"""The parts of a batch, as ``fit()`` of Keras reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

__all__ = ["unpack", "with_class_weight"]


def unpack(batch: Any, model: Any) -> tuple[Any, Any, Any]:
    """Return the features, target, and sample weights of a batch, with None for missing parts.

    Three parts are ``(x, y, sample_weight)``, or ``(x1, x2, y)`` if the model has two inputs.
    """
    if not isinstance(batch, tuple | list):
        return batch, None, None
    if len(batch) == 3 and _has_weights(batch, model):
        return batch[0], batch[1], batch[2]
    *features, target = batch if len(batch) > 1 else (*batch, None)
    return features[0] if len(features) == 1 else features, target, None


def _has_weights(batch: Any, model: Any) -> bool:
    if tf.nest.is_nested(batch[0]):
        return True
    inputs: Any = getattr(model, "inputs", None)
    return inputs is None or len(tf.nest.flatten(inputs)) == 1


def with_class_weight(class_weight: Mapping[int, float], target: Any, sample_weight: Any) -> Any:
    """Return sample weights times the weight of each target's class, which is 1 by default."""
    if tf.nest.is_nested(target) or target is None:
        raise ValueError(
            "register(class_weight=...) is for models with one target. Yield batches "
            "(x, y, sample_weight) instead."
        )
    classes = np.asarray(target)
    if classes.ndim > 1:
        one_hot = classes.shape[-1] > 1
        classes = classes.argmax(axis=-1) if one_hot else classes[..., 0]
    found = [class_weight.get(each, 1.0) for each in classes.round().astype(int).ravel().tolist()]
    weights = np.asarray(found, np.float32).reshape(classes.shape)
    if sample_weight is None:
        return weights
    sample_weight = np.asarray(sample_weight, np.float32)
    return weights.reshape(sample_weight.shape) * sample_weight
