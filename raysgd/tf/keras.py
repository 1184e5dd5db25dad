"""The two Kerases: Keras 3 and tf_keras, which differ in names and in what variables are."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

__all__ = [
    "flavor_of",
    "is_keras_model",
    "kerases",
    "local_variable",
    "named_arrays",
    "set_arrays",
    "tf_variable",
]


def kerases() -> list[Any]:
    """Return the Kerases that are imported in this process: ``keras``, ``tf_keras``, or both."""
    return [sys.modules[name] for name in ("keras", "tf_keras") if name in sys.modules]


def is_keras_model(thing: Any) -> bool:
    """Whether it is a model of one of them."""
    return any(isinstance(thing, keras.Model) for keras in kerases())


def flavor_of(model: Any) -> Any:
    """Return the Keras that a model is of: the module ``keras`` or ``tf_keras``."""
    for keras in kerases():
        if isinstance(model, keras.Model):
            return keras
    raise TypeError(f"{model!r} is no Keras model.")


def tf_variable(variable: Any) -> Any:
    """Return the TensorFlow variable behind a variable of either Keras."""
    held = getattr(variable, "value", variable)
    return variable if callable(held) else held


def local_variable(variable: Any) -> Any:
    """Return this worker's own part of a variable, to read or write without communication.

    A variable that is summed or averaged when it is read, like the statistics of tf_keras's batch
    normalization, would wait for the other workers.
    """
    held = tf_variable(variable)
    values = getattr(held, "values", None)
    return values[0] if isinstance(values, tuple | list) else held


def named_arrays(variables: Iterable[Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Return copies of variables as arrays, by their number and name, in their order."""
    return {
        f"{number}/{getattr(variable, 'path', None) or variable.name}": np.array(
            local_variable(variable).numpy()
        )
        for number, variable in enumerate(variables)
    }


def set_arrays(variables: Iterable[Any], arrays: dict[str, Any]) -> None:
    """Take over what `named_arrays` returned, in that order: names may differ between processes."""
    for variable, array in zip(variables, arrays.values(), strict=True):
        held = local_variable(variable)
        held.assign(tf.cast(tf.convert_to_tensor(np.asarray(array)), held.dtype))
