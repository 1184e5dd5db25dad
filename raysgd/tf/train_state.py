"""The training state of a Keras operator, what is saved of it, and its random numbers."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state  # Keras 3.15 has no public API for this
from keras.src.random.seed_generator import global_seed_generator

from raysgd._internal.context import WorkerContext
from raysgd._internal.forwarding import forward_to
from raysgd._internal.nested import load_or_restore, try_copy
from raysgd.loop.feature import MicroBatching
from raysgd.loop.state_access import StateAccess, check_objects
from raysgd.loop.train_state import RandomGenerators, TrainState
from raysgd.tf.communication import KerasCollectives, create_collectives
from raysgd.tf.keras import named_arrays, set_arrays, set_trainable, to_portable, trainable_flags
from raysgd.tf.layer_state import layer_states, layers_problem, set_layer_states
from raysgd.tf.losses import BatchLosses, compiled_objects
from raysgd.tf.options import TFSettings
from raysgd.tf.sources import KerasSources
from raysgd.tf.step_graphs import NEXT_PHASE, StepGraphs

_RATE = re.compile("'learning_rate': [^,}]*")
_PURPOSE = re.compile(r"[^/_\d]+(?=[_\d]*$)")  # the last word of a path, such as velocity
_ADDRESS = re.compile(" at 0x[0-9a-f]+")  # of objects, which each get_config may create again


class KerasTrainState(TrainState):
    """The registered models, optimizers, and losses, and the position in the data."""

    settings: TFSettings
    data: KerasSources
    losses: BatchLosses
    """Set by ``register``, like `optimization`."""
    optimization: Any  # a `KerasOptimization`, whose module imports this one
    given_models: list[Any] = forward_to("models")

    def __init__(self, settings: TFSettings) -> None:
        super().__init__(settings, settings.options.seed)
        self.models: list[Any] = []
        self.data = KerasSources(settings, self.position.seed)
        self.collectives: KerasCollectives = create_collectives(settings)
        self.micro_batching = MicroBatching(settings, self.update)
        self.graphs = StepGraphs()
        self.not_finite: list[str] = []  # weights that were not finite before training
        self.read_compiled: Callable[[], list[Any]] = list  # what `register` uses of compile()
        self.compiled_at_register: list[Any] = []
        self.setup_arguments: list[Any] = []  # of compile(): constants of the graphs
        self.attributes: Mapping[str, Any] = {}  # of the operator
        self.setup_objects: Mapping[str, Any] = {}  # those that are registered, when `setup` ended

    def begin_generation(self, context: WorkerContext) -> None:
        super().begin_generation(context)
        self.collectives = create_collectives(self.settings)

    def compile_arguments(self) -> list[Any]:
        arguments = [each for model in self.models for each in compiled_objects(model)]
        for options, rate, _ in map(_options_of, self.optimizers):
            arguments += [options, None if isinstance(rate, float) else rate]
        return arguments

    def accept_changes(self) -> None:
        """Trace steps again after `trainable` has changed, and refuse changes without an effect."""
        now = [(each, self.attributes.get(name)) for name, each in self.setup_objects.items()]
        is_replaced = any(new is not None and new is not each for each, new in now)
        if is_replaced or self.compile_arguments() != self.setup_arguments:
            raise RuntimeError(
                "After setup, a model was compiled, an attribute of an optimizer was changed, or "
                "the model, optimizer, criterion, or metrics of the operator were replaced. But "
                "TFTrainer trains with those of setup. Only a rate that is a number can change, by "
                f"optimizer.learning_rate. Freeze layers by layer.trainable. {NEXT_PHASE}"
            )
        if self.graphs.trainable != (trainable := self.trainable_flags()):
            self.graphs = StepGraphs(trainable)

    def list_trained(self) -> list[tuple[Any, list[Any]]]:
        groups = [self.models] * len(self.optimizers)
        if len(self.models) == len(self.optimizers):
            groups = [[model] for model in self.models]
        return [
            (optimizer, [v for model in models for v in model.trainable_variables])
            for optimizer, models in zip(self.optimizers, groups, strict=True)
        ]

    def warn_of_batch(self, loss: Any, masks: Any) -> None:
        if loss.shape.rank:
            self.warn_of_loss("The loss has a value for each sample, and their gradients add up.")
        if any(mask is not None for mask in tf.nest.flatten(masks)):
            self.warn_of_loss("The model masks its output, and Keras losses skip masked steps.")

    def warn_of_loss(self, what: str) -> None:
        """Warn once if training on several workers differs from training on one."""
        size = self.collectives.size
        if size > 1:
            self.settings.warn_once(
                "loss",
                "%s %d workers weight their losses by samples, so updates can differ from updates "
                "of one worker. Use a loss that is a mean over samples.",
                what,
                size,
            )

    def copy_leaf(self, leaf: Any, on_host: bool = False, may_alias: bool = False) -> Any:
        if hasattr(leaf, "numpy"):  # a tensor or a variable
            return np.array(leaf.numpy())
        if hasattr(leaf, "__array__") and not isinstance(leaf, np.ndarray | np.generic):
            return np.array(leaf)
        return try_copy(leaf)

    def trainable_flags(self) -> list[dict[str, bool]]:
        return [trainable_flags(model) for model in self.models]


class KerasStateAccess(StateAccess):
    """Reads and loads the registered models and optimizers."""

    _train_state: KerasTrainState

    def unsharded_models(self) -> list[Any]:
        with self._train_state.evaluating():
            return [to_portable(model) for model in self._train_state.models]

    def user_settings(self) -> Any:
        optimizers = self._train_state.optimizers
        return self._train_state.trainable_flags(), list(map(_options_of, optimizers))

    def read(self, frozen: bool = True) -> dict[str, Any]:
        train_state = self._train_state
        return {
            "models": [named_arrays(model.weights) for model in train_state.models],
            "layers": [layer_states(model) for model in train_state.models],
            "trainable": train_state.trainable_flags(),
            "optimizers": [named_arrays(each.variables) for each in train_state.optimizers],
        } | ({"not_finite": train_state.not_finite} if train_state.not_finite else {})

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


def _options_of(optimizer: Any) -> tuple[str, Any, list[str]]:
    """Return an optimizer's options without rates, its rate, and rates of optimizers in it."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rate, options = inner._learning_rate, ""  # the public one is a schedule's current value
    with contextlib.suppress(NotImplementedError, TypeError):  # a rate without get_config
        options = _ADDRESS.sub("", str(inner.get_config()))
    rate = float(rate) if hasattr(rate, "numpy") else rate
    return _RATE.sub("", options), rate, _RATE.findall(options)


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


class KerasRandomGenerators(RandomGenerators):
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
        text = "The state has %d random seeds in %s, but the operator has %d. None is loaded."
        for name, own in self._seeds().items():
            if (number := len(state.get(name, ()))) == len(own):
                for variable, seed in zip(own, state[name], strict=True):
                    variable.assign(np.asarray(seed))
            elif name in state:
                self._operator._train_state.settings.warn_once(name, text, number, name, len(own))
        if "keras_global" in state:
            global_seed_generator().state.assign(np.asarray(state["keras_global"]))
        super().set(state)  # last, because a new generator of Keras draws its seed from Python's

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
