"""Keras models: arrays of their variables, options, transfer to the driver, mixed precision."""

import contextlib
import re
from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from raysgd.tf.layer_state import flat_layers, layer_states, set_layer_states

_RATE = re.compile("'learning_rate': [^,}]*")
_ADDRESS = re.compile(" at 0x[0-9a-f]+")  # of objects, which each get_config may create again


def overrides(model: Any, name: str) -> bool:
    """Return whether the class of a model overrides a method of Keras."""
    return getattr(type(model), name) is not getattr(keras.Model, name)


def arrays_of(variables: Iterable[Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Return copies of variables as arrays, in order. The keys are ``number/name``."""
    return {
        f"{n}/{variable.path}": np.array(variable.numpy()) for n, variable in enumerate(variables)
    }


def set_arrays(variables: Iterable[Any], arrays: Mapping[str, Any]) -> None:
    """Assign the arrays of `arrays_of` in order, because names may differ between processes."""
    for variable, array in zip(variables, arrays.values(), strict=True):
        variable.assign(np.asarray(array))


def options_of(optimizer: Any) -> tuple[str, Any, list[str]]:
    """Return an optimizer's options without rates, its rate, and rates of optimizers in it."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rate, options = inner._learning_rate, ""  # the public one is a schedule's current value
    with contextlib.suppress(NotImplementedError, TypeError):  # a rate without get_config
        options = _ADDRESS.sub("", str(inner.get_config()))
    rate = float(rate) if hasattr(rate, "numpy") else rate
    return _RATE.sub("", options), rate, _RATE.findall(options)


def trainable_flags(model: Any) -> dict[str, bool]:
    """Return which layers and variables are trainable, by ``number/path``."""
    return {f"{n}/{each.path}": each.trainable for n, each in enumerate(_layers_and_weights(model))}


def set_trainable(model: Any, values: Mapping[str, bool]) -> None:
    # Layers come first, because they set inner ones. Twice, because layers can share inner ones.
    for each, value in [*zip(_layers_and_weights(model), values.values(), strict=True)] * 2:
        if each.trainable != value:
            each.trainable = value


def _layers_and_weights(model: Any) -> list[Any]:
    return [*flat_layers(model), *model.weights]


def to_portable(model: Any) -> dict[str, Any]:
    """Return the architecture and the weights of a model."""
    objects = _user_objects(model)  # sets the names in the architecture
    try:
        architecture = keras.saving.serialize_keras_object(model)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise TypeError(
            f"get_model() cannot send {type(model).__name__} to the driver: {error}. Define "
            "get_config() in this class, or create the model on the driver, with the weights of "
            "state_dict()['models']."
        ) from error
    return {
        "architecture": architecture,
        "objects": objects,
        "layers": layer_states(model),
        "weights": arrays_of(model.weights),
    }


def _user_objects(model: Any) -> dict[str, Any]:
    """Return the user's classes and functions in a model, by unique names for the architecture.

    The decorators that register classes do not run on workers, so the driver needs the objects.
    """
    objects: dict[str, Any] = {}
    reachable, seen = [model], set()
    for item in reachable:
        if id(item) in seen:
            continue
        seen.add(id(item))
        kind = item if isinstance(item, type | FunctionType) else type(item)
        # Keras wraps methods of layers in functions that keep the names of the methods.
        module = getattr(kind, "__globals__", {"__name__": str(kind.__module__)})["__name__"]
        is_of_user = module.split(".")[0] not in ("builtins", "keras", "numpy", "tensorflow")
        if is_of_user and (hasattr(kind, "get_config") or isinstance(item, FunctionType)):
            name = keras.saving.get_registered_name(kind)
            if name == "<lambda>" or objects.get(name, kind) is not kind:
                kind.__name__ = name = f"{name.strip('<>')}_{id(kind)}"
            objects[name] = kind
        if isinstance(item, list | tuple | set | dict):
            reachable.extend(item.values() if isinstance(item, dict) else item)
        if kind is not item and (hasattr(kind, "get_config") or module.startswith("keras.")):
            reachable.extend(getattr(item, "__dict__", {}).values())
    return objects


def from_portable(portable_model: Mapping[str, Any]) -> Any:
    architecture = portable_model["architecture"]
    with keras.saving.custom_object_scope(portable_model["objects"]):
        model = keras.saving.deserialize_keras_object(architecture, safe_mode=False)
    set_layer_states(model, portable_model["layers"])
    set_arrays(model.weights, portable_model["weights"])
    return model


def policy_name(use_fp16: bool | str) -> str | None:
    """Return the policy for ``use_fp16``. True means float16 on a GPU and bfloat16 on a CPU."""
    if not use_fp16 or isinstance(use_fp16, str):
        return use_fp16 or None
    return "mixed_float16" if tf.config.list_physical_devices("GPU") else "mixed_bfloat16"
