"""The random number generators of a Keras operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
from keras.src.backend.common import global_state  # Keras 3.15 has no public API for this
from keras.src.random.seed_generator import global_seed_generator

from raysgd.loop.generators import Generators


class KerasGenerators(Generators):
    """Adds the seeds of the registered models, of the operator's layers, and of Keras itself."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator

    def state(self) -> dict[str, Any]:
        state = super().state()
        for name, seeds in self._seeds().items():
            state[name] = [np.array(variable.numpy()) for variable in seeds]
        if (shared := global_state.get_global_attribute("global_seed_generator")) is not None:
            state["keras_global"] = np.array(shared.state.numpy())
        return state

    def set(self, state: Mapping[str, Any]) -> None:
        super().set(state)
        for name, own in self._seeds().items():
            if (number := len(state.get(name, ()))) == len(own):
                for variable, seed in zip(own, state[name], strict=True):
                    variable.assign(np.asarray(seed))
            elif name in state:
                text = (
                    "The state has %d random seeds in %s, but the operator has %d. None is loaded."
                )
                self._operator._train_state.settings.warn_once(name, text, number, name, len(own))
        if "keras_global" in state:
            global_seed_generator().state.assign(np.asarray(state["keras_global"]))

    def _seeds(self) -> dict[str, list[Any]]:
        models = {id(seed): seed for seed in _seeds_of(self._operator._train_state.models)}
        own = (seed for each in vars(self._operator).values() for seed in _seeds_of(each))
        others = {id(seed): seed for seed in own if id(seed) not in models}
        return {"keras_models": list(models.values()), "keras_others": list(others.values())}


def _seeds_of(value: Any) -> Iterator[Any]:
    if isinstance(value, keras.random.SeedGenerator):
        yield value.state
    elif isinstance(value, keras.Layer):
        weights = {id(variable) for variable in value.weights}
        yield from (v for v in value.variables if id(v) not in weights)
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _seeds_of(each)
