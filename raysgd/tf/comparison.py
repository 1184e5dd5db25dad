"""Checks that all workers train the same replica on the same step."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from raysgd.errors import ReplicasDifferError
from raysgd.loop.differences import compare, cpu_model, format_values, hash_of, minority_of
from raysgd.tf.train_state import KerasTrainState


def compare_update(
    state: KerasTrainState, variables: Sequence[Any] = (), lacks_gradient: bool = False
) -> bool:
    """Return whether any worker lacks a gradient. Every worker must call this.

    Raise an error if others train other variables, have read other samples, or are at the end of an
    epoch, without variables.
    """
    if state.collectives.size == 1:
        return False
    trained = state.engine.cache(lambda: _describe_variables(state.models, variables), *variables)
    contents = {
        "the samples that they have read": state.data.current.update_digest,
        "what they train": trained,
    }
    return _check_equal(state, contents, lacks_gradient)


def _describe_variables(models: Sequence[Any], variables: Sequence[Any]) -> str:
    """Describe variables by their place in the models, because names may differ."""
    places = {id(v): n for n, v in enumerate(v for model in models for v in model.weights)}
    return ", ".join(f"variable {places.get(id(v))} {tuple(v.shape)}" for v in variables)


def check_values(state: KerasTrainState) -> None:
    """Raise an error if weights or optimizers differ between workers with equal CPUs."""
    if state.collectives.size == 1:
        return
    weights = [(v, v.trainable) for model in state.models for v in model.weights]
    states = [(v, True) for optimizer in state.optimizers for v in optimizer.variables]
    digests = {
        f"value {n} of {v.path}": zlib.crc32(v.numpy().tobytes()) if is_trained else "frozen"
        for n, (v, is_trained) in enumerate(weights + states)
    }
    _check_equal(state, {**digests, "CPU": cpu_model()})


def _check_equal(state: KerasTrainState, contents: dict[str, Any], flag: bool = False) -> bool:
    """Raise an error if contents differ between workers. Return whether any has the flag."""
    values = [*contents.values()]  # names may differ between processes
    digest = hash_of(values)
    smallest, of_inverse, found = state.collectives.minima(digest, ~digest, -flag)
    if smallest == ~of_inverse:
        return bool(found)
    size = state.collectives.size
    reports = [state.collectives.broadcast(lambda: values, rank) for rank in range(size)]
    differences = compare([dict(zip(contents, each, strict=False)) for each in reports])
    if differences.keys() == {"CPU"}:
        return False
    names = [f"{name} ({format_values(values)})" for name, values in differences.items()]
    message = (
        f"After step {state.global_step}, the workers differ in: {'; '.join(names[:5])}. Common "
        "causes: code that changes them on one worker only; data of other lengths, or in other "
        "orders, such as deterministic=False, shuffles without a seed, and names from a set; "
        "data that each worker selects itself, without TFTrainer(add_dist_sampler=False). "
        "Correct the cause, and load a checkpoint or the state of worker 0: "
        "trainer.load_state_dict(trainer.state_dict())."
    )
    if "CPU" in differences:
        state.settings.warn_once("cpus", "%s Or rounding: their CPUs differ.", message)
        return False
    raise ReplicasDifferError(message, ranks=minority_of(differences, size))
