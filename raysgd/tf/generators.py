"""The random number generators of a Keras operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
from keras.src.backend.common import global_state  # Keras 3.15 has no public API for this
from keras.src.random.seed_generator import global_seed_generator

from raysgd.loop.state import Generators


class KerasGenerators(Generators):
    """Adds the seeds of the registered models, of the operator's layers, and of Keras itself."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator

    def state(self) -> dict[str, Any]:
        seeds = [np.array(variable.numpy()) for variable in self._seeds()]
        state = {**super().state(), "keras": seeds}
        if (shared := global_state.get_global_attribute("global_seed_generator")) is not None:
            state["keras_global"] = np.array(shared.state.numpy())
        return state

    def set(self, state: Mapping[str, Any]) -> None:
        super().set(state)
        own, seeds = self._seeds(), state.get("keras", ())
        if len(own) == len(seeds):  # a model with other layers draws its own numbers
            for variable, seed in zip(own, seeds, strict=True):
                variable.assign(np.asarray(seed))
        if "keras_global" in state:
            global_seed_generator().state.assign(np.asarray(state["keras_global"]))

    def _seeds(self) -> list[Any]:
        held = [self._operator._train_state.models, *vars(self._operator).values()]
        found = {id(seed): seed for each in held for seed in _seeds_of(each)}
        return list(found.values())


def _seeds_of(held: Any) -> Iterator[Any]:
    if isinstance(held, keras.random.SeedGenerator):
        yield held.state
    elif isinstance(held, keras.Layer):
        weights = {id(variable) for variable in held.weights}
        yield from (v for v in held.variables if id(v) not in weights)
    elif isinstance(held, list | tuple | dict):
        for each in held.values() if isinstance(held, dict) else held:
            yield from _seeds_of(each)
