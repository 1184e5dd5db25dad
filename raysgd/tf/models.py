"""Keras models on their way from a worker to the driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysgd.tf.keras import flavor_of, named_arrays, set_arrays

__all__ = ["assembled", "portable"]


def portable(model: Any) -> dict[str, Any]:
    """Return what makes a model anew: which Keras, its architecture, its weights as arrays.

    Raises:
        TypeError: if Keras cannot tell how the model is made.
    """
    keras = flavor_of(model)
    try:
        architecture = keras.saving.serialize_keras_object(model)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise TypeError(
            f"get_model() cannot send {type(model).__name__} to the driver: {error}. Give it a "
            "get_config(), or make it there and take its weights from state_dict()['models']."
        ) from error
    return {
        "keras": keras.__name__,
        "architecture": architecture,
        "weights": named_arrays(model.weights),
    }


def assembled(portable_model: Mapping[str, Any]) -> Any:
    """Return the model that `portable` took apart."""
    import importlib

    keras = importlib.import_module(portable_model["keras"])
    architecture = portable_model["architecture"]
    model = keras.saving.deserialize_keras_object(architecture, safe_mode=False)
    set_arrays(model.weights, portable_model["weights"])
    return model
