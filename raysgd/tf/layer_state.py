"""What the layers of a model keep in addition to their variables, such as vocabularies."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

_FILE = "file: "
"""Prefix of the files of ``save_assets`` in a layer's state."""


def flat_layers(model: Any) -> Any:
    """Return a model, its layers, and those in layers. Keras has no public list of the latter."""
    return model._flatten_layers()


def layer_states(model: Any) -> dict[str, dict[str, Any]]:
    """Return the state of each layer that keeps more than variables, by ``number/name``."""
    return {f"{n}/{layer.name}": _state_of(layer) for n, layer in enumerate(_layers_to_save(model))}


def set_layer_states(model: Any, states: Mapping[str, Any]) -> None:
    """Load the result of `layer_states`. Graphs of the model are outdated if it is not empty."""
    for layer, state in zip(_layers_to_save(model), states.values(), strict=True):
        if "bin_boundaries" in state:
            layer.bin_boundaries = state["bin_boundaries"]
        elif "vocabulary" not in state:
            _load_own(layer, dict(state))
        elif "idf_weights" in state or state != _state_of(layer):  # no table can become empty
            layer.set_vocabulary(json.loads(state["vocabulary"]), state.get("idf_weights"))


def layers_problem(model: Any, states: Mapping[str, Any]) -> str:
    number, own = len(states), len(_layers_to_save(model))
    fits = number == own
    return "" if fits else f"it has {number} layers that keep more than variables, not {own}"


def _layers_to_save(model: Any) -> list[Any]:
    """Return the preprocessing layers, and the user's layers that load more than variables."""
    loaders = [(each, type(each).load_own_variables.__module__) for each in flat_layers(model)]
    special = [
        layer
        for layer, module in loaders
        if ".preprocessing." in module
        or not module.startswith("keras.")
        or hasattr(layer, "load_assets")
    ]
    # The vocabulary of a TextVectorization is in its lookup layer.
    return [each for each in special if not isinstance(each, keras.layers.TextVectorization)]


def _state_of(layer: Any) -> dict[str, Any]:
    if isinstance(layer, keras.layers.Discretization):
        return {"bin_boundaries": layer.bin_boundaries and list(layer.bin_boundaries)}
    state: dict[str, Any] = {}
    if isinstance(layer, keras.layers.StringLookup | keras.layers.IntegerLookup):
        state["vocabulary"] = json.dumps(layer.get_vocabulary(), default=int)
        if hasattr(layer, "idf_weights_const"):  # which may have padding
            state["idf_weights"] = np.array(layer.idf_weights_const)[: layer.vocabulary_size()]
        return state
    layer.save_own_variables(state)
    state = {k: np.array(v.numpy() if hasattr(v, "numpy") else v) for k, v in state.items()}
    if hasattr(layer, "save_assets"):
        with tempfile.TemporaryDirectory() as folder:
            layer.save_assets(folder)
            for path in filter(Path.is_file, Path(folder).rglob("*")):
                name = f"{_FILE}{path.relative_to(folder)}"
                state[name] = np.fromfile(path, np.uint8)
    return state


def _load_own(layer: Any, state: dict[str, Any]) -> None:
    files = {name: state.pop(name) for name in list(state) if name.startswith(_FILE)}
    layer.load_own_variables(state)
    if hasattr(layer, "load_assets"):
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                path = Path(folder, name.removeprefix(_FILE))
                path.parent.mkdir(parents=True, exist_ok=True)
                np.asarray(content).tofile(path)
            layer.load_assets(folder)
