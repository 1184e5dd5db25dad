"""Differences between Keras 3 and tf_keras: names, variables, models, and precisions."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf


def kerases() -> list[Any]:
    """Return the imported Keras modules: ``keras``, ``tf_keras``, or both."""
    return [sys.modules[name] for name in ("keras", "tf_keras") if name in sys.modules]


def flavor_of(model: Any) -> Any:
    """Return the module of a model, ``keras`` or ``tf_keras``. None for other objects."""
    return next((keras for keras in kerases() if isinstance(model, keras.Model)), None)


def overrides(model: Any, name: str) -> bool:
    """Return whether the class of a model overrides a method of Keras."""
    return getattr(type(model), name) is not getattr(flavor_of(model).Model, name)


def tf_variable(variable: Any) -> Any:
    """Return the TensorFlow variable behind a variable of either Keras."""
    held = getattr(variable, "value", variable)
    return variable if callable(held) else held


def named_arrays(variables: Iterable[Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Return copies of variables as arrays, in order. The keys are ``number/name``."""
    return {
        f"{number}/{getattr(variable, 'path', None) or variable.name}": np.array(
            tf_variable(variable).numpy()
        )
        for number, variable in enumerate(variables)
    }


def set_arrays(variables: Iterable[Any], arrays: dict[str, Any]) -> None:
    """Assign the arrays of `named_arrays` in order, because names may differ between processes."""
    for variable, array in zip(variables, arrays.values(), strict=True):
        held = tf_variable(variable)
        held.assign(tf.cast(tf.convert_to_tensor(np.asarray(array)), held.dtype))


# ---- transfer of models from a worker to the driver


def portable(model: Any) -> dict[str, Any]:
    """Return the Keras module, the architecture, and the weights of a model."""
    keras = flavor_of(model)
    try:
        architecture = keras.saving.serialize_keras_object(model)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise TypeError(
            f"get_model() cannot send {type(model).__name__} to the driver: {error}. Define "
            "get_config() in this class, or create the model on the driver, with the weights of "
            "state_dict()['models']."
        ) from error
    return {
        "keras": keras.__name__,
        "architecture": architecture,
        "weights": named_arrays(model.weights),
    }


def assembled(portable_model: Mapping[str, Any]) -> Any:
    keras = importlib.import_module(portable_model["keras"])
    architecture = portable_model["architecture"]
    model = keras.saving.deserialize_keras_object(architecture, safe_mode=False)
    set_arrays(model.weights, portable_model["weights"])
    return model


# ---- mixed precision, by policies


def policy_name(use_fp16: bool | str) -> str | None:
    """Return the policy for ``use_fp16``. True means float16 on a GPU and bfloat16 on a CPU."""
    if not use_fp16:
        return None
    if isinstance(use_fp16, str):
        return use_fp16
    return "mixed_float16" if tf.config.list_physical_devices("GPU") else "mixed_bfloat16"


def set_policy(name: str) -> None:
    """Set the precision of all models that are created afterwards."""
    tf.keras.layers  # noqa: B018  imports the Keras that this process chose
    for keras in kerases():
        keras.mixed_precision.set_global_policy(name)


def scaled_optimizer(keras: Any, optimizer: Any, use_fp16: bool | str) -> Any:
    """Return an optimizer that scales the loss if gradients are float16."""
    scales = keras.mixed_precision.LossScaleOptimizer
    if policy_name(use_fp16) != "mixed_float16" or isinstance(optimizer, scales):
        return optimizer
    return scales(optimizer)


def variables_of(thing: Any) -> list[Any]:
    """Return the variables of a model or an optimizer, including its learning rate."""
    if flavor_of(thing) is not None:
        return list(thing.weights)
    variables = list(thing.variables)
    inner = getattr(thing, "inner_optimizer", None)
    rate = getattr(inner or thing, "_learning_rate", None)
    if isinstance(rate, tf.Variable) and not any(rate is v for v in variables):
        variables.append(rate)  # tf_keras does not list it
    return variables


def loss_scale_of(optimizer: Any) -> list[Any]:
    """Return the loss scale of tf_keras, which ``variables`` of the optimizer lacks."""
    scale: Any = getattr(optimizer, "_loss_scale", None)
    return [scale.current_loss_scale, scale.counter] if hasattr(scale, "counter") else []
