"""What is saved of a Keras operator, and sent to new workers."""

import contextlib
import functools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from raysgd._internal.nested import load_or_restore
from raysgd.loop.state_access import StateAccess, check_objects
from raysgd.tf.keras import arrays_of, options_of, set_arrays, set_trainable, to_portable
from raysgd.tf.layer_state import layer_states, layers_problem, set_layer_states
from raysgd.tf.step_graphs import StepGraphs
from raysgd.tf.train_state import KerasTrainState

_PURPOSE = re.compile(r"[^/_\d]+(?=[_\d]*$)")  # the last word of a path, such as velocity


class KerasStateAccess(StateAccess):
    """Reads and loads the registered models and optimizers."""

    _train_state: KerasTrainState

    def unsharded_models(self, only_weights: bool = False) -> list[Any]:
        with self._train_state.evaluating():
            models = self._train_state.models
            if not only_weights:
                return list(map(to_portable, models))
            arrays = [arrays_of(model.weights) for model in models]
        if len(arrays) == 1:
            return arrays
        return [{f"{n}.{key}": a for n, each in enumerate(arrays) for key, a in each.items()}]

    def user_settings(self) -> Any:
        optimizers = self._train_state.optimizers
        return self._train_state.trainable_flags(), list(map(options_of, optimizers))

    def read(self, frozen: bool = True) -> dict[str, Any]:
        train_state = self._train_state
        return {
            "models": [arrays_of(model.weights) for model in train_state.models],
            "layers": [layer_states(model) for model in train_state.models],
            "trainable": train_state.trainable_flags(),
            "optimizers": [arrays_of(each.variables) for each in train_state.optimizers],
        } | ({"not_finite": train_state.nonfinite_weights} if train_state.nonfinite_weights else {})

    def check(self, state: dict[str, Any]) -> None:
        train_state = self._train_state
        weights = [model.weights for model in train_state.models]
        check_objects("models", weights, state.get("models"), _variables_problem)
        check_objects("layers", train_state.models, state.get("layers"), layers_problem)
        trainable = train_state.trainable_flags()
        check_objects("trainable", trainable, state.get("trainable", trainable), _trainable_problem)
        saved = state.get("optimizers")
        check_objects("optimizers", train_state.optimizers, saved, _optimizer_problem)

    def load(self, state: dict[str, Any]) -> None:
        train_state, models = self._train_state, self._train_state.models
        if any(state["layers"]):
            train_state.graphs = StepGraphs()  # graphs hold the old tensors and tables
        with contextlib.ExitStack() as undoing:  # after `check`, only code of layers can fail
            for n, (model, layers) in enumerate(zip(models, state["layers"], strict=True)):
                load, own = functools.partial(set_layer_states, model), layer_states(model)
                undoing.enter_context(load_or_restore(model, own, layers, f"layers[{n}]", load))
        for model, arrays in zip(models, state["models"], strict=True):
            set_arrays(model.weights, arrays)
        if "trainable" in state:  # older files lack it
            for model, values in zip(models, state["trainable"], strict=True):
                set_trainable(model, values)
        for optimizer, arrays in zip(train_state.optimizers, state["optimizers"], strict=True):
            set_arrays(optimizer.variables, arrays)


def _trainable_problem(own: Mapping[str, bool], saved: Mapping[str, bool]) -> str:
    fits = len(own) == len(saved)
    return "" if fits else f"it has {len(saved)} layers and variables, not {len(own)}"


def _optimizer_problem(optimizer: Any, arrays: Mapping[str, Any]) -> str:
    if problem := _variables_problem(optimizer.variables, arrays):
        return problem
    for variable, name in zip(optimizer.variables, arrays, strict=True):
        if _PURPOSE.findall(variable.path) != _PURPOSE.findall(name):
            return f"it has {name} in place of {variable.path}"
    return ""


def _variables_problem(variables: list[Any], arrays: Mapping[str, Any]) -> str:
    if len(arrays) != len(variables):
        return f"it has {len(arrays)} variables, not {len(variables)}"
    for variable, (name, array) in zip(variables, arrays.items(), strict=True):
        shape, expected = np.shape(array), tuple(variable.shape)
        if shape != expected:
            return f"{name} has the shape {shape}, not {expected}"
    return ""
