"""The training state of a Keras operator, and its random numbers."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from raysgd._internal.nested import try_copy
from raysgd._internal.runner import WorkerContext
from raysgd.loop.micro_batching import MicroBatching
from raysgd.loop.train_state import RandomGenerators, TrainState
from raysgd.tf.communication import KerasCollectives, create_collectives
from raysgd.tf.keras import options_of, trainable_flags
from raysgd.tf.losses import BatchLosses, compiled_objects
from raysgd.tf.options import KerasSettings
from raysgd.tf.private_keras import get_global_attribute, global_seed_generator
from raysgd.tf.sources import KerasSources
from raysgd.tf.step_graphs import NEXT_PHASE, StepGraphs


class KerasTrainState(TrainState):
    """The registered models, optimizers, and losses, and the position in the data."""

    settings: KerasSettings
    data: KerasSources
    losses: BatchLosses
    """Set by ``register``, like `optimization`."""
    optimization: Any  # a `KerasOptimization`, whose module imports this one

    def __init__(self, settings: KerasSettings) -> None:
        super().__init__(settings)
        self.data = KerasSources(settings, settings.options.seed)
        self.collectives: KerasCollectives = create_collectives(settings)
        self.micro_batching = MicroBatching(self)
        self.generators = KerasRandomGenerators(self)
        self.graphs = StepGraphs()
        self.nonfinite_weights: list[str] = []  # before training
        self.get_compiled_objects: Callable[[], list[Any]] = list  # those that `register` uses
        self.compiled_objects_at_register: list[Any] = []
        self.compile_arguments_at_setup: list[Any] = []  # constants of the graphs
        self.attributes: Mapping[str, Any] = {}  # of the operator
        self.registered_at_setup: Mapping[str, Any] = {}  # attributes, when `setup` ended

    def begin_generation(self, context: WorkerContext) -> None:
        super().begin_generation(context)
        self.collectives = create_collectives(self.settings)

    def compile_arguments(self) -> list[Any]:
        arguments = [each for model in self.models for each in compiled_objects(model)]
        for options, rate, _ in map(options_of, self.optimizers):
            arguments += [options, None if isinstance(rate, float) else rate]
        return arguments

    def accept_changes(self) -> None:
        """Trace steps again after `trainable` has changed, and refuse changes without an effect."""
        now = [(each, self.attributes.get(name)) for name, each in self.registered_at_setup.items()]
        is_replaced = any(new is not None and new is not each for each, new in now)
        if is_replaced or self.compile_arguments() != self.compile_arguments_at_setup:
            raise RuntimeError(
                "After setup, a model was compiled, an attribute of an optimizer was changed, or "
                "the model, optimizer, criterion, or metrics of the operator were replaced. But "
                "TFTrainer trains with those of setup. Only a rate that is a number can change, by "
                f"optimizer.learning_rate. Freeze layers by layer.trainable. {NEXT_PHASE}"
            )
        if self.graphs.trainable != (trainable := self.trainable_flags()):
            self.graphs = StepGraphs(trainable)

    @contextlib.contextmanager
    def preserving_models(self) -> Iterator[None]:
        weights = [variable for model in self.models for variable in model.weights]
        saved = [tf.identity(variable.value) for variable in weights]
        try:
            yield
        finally:
            for variable, value in zip(weights, saved, strict=True):
                variable.assign(value)

    def list_trained(self) -> list[tuple[Any, list[Any]]]:
        groups = [self.models] * len(self.optimizers)
        if len(self.models) == len(self.optimizers):
            groups = [[model] for model in self.models]
        return [
            (optimizer, [v for model in models for v in model.trainable_variables])
            for optimizer, models in zip(self.optimizers, groups, strict=True)
        ]

    def initial_hyperparameters(self) -> list[float | None]:
        """Return the learning rates after ``setup``; None for a schedule."""
        rates = map(learning_rate_of, self.optimizers)
        return [rate if rate is None else float(rate) for rate in rates]

    def rescale_hyperparameters(self, then: list[float | None], now: list[float | None]) -> None:
        """Multiply each learning rate by the ratio of initial rates, now / then."""
        for optimizer, old, new in zip(self.optimizers, then, now, strict=True):
            if old is not None and new is not None and old != new:
                rate = learning_rate_of(optimizer)
                rate.assign(new * (float(rate) / old if old else 1.0))

    def warn_of_batch(self, loss: Any, masks: Any) -> None:
        if any(tf.convert_to_tensor(each).shape.rank for each in (loss, *self.models[0].losses)):
            self.warn_of_loss("A loss has a value for each sample, and their gradients add up.")
        if any(mask is not None for mask in tf.nest.flatten(masks)):
            self.warn_of_loss("The model masks its output, and Keras losses skip masked steps.")

    def warn_of_loss(self, what: str) -> None:
        """Warn once if training on several workers differs from training on one."""
        if (size := self.collectives.size) > 1:
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


class KerasRandomGenerators(RandomGenerators):
    """Adds the seeds of the registered models, of the operator's layers, and of Keras itself."""

    def __init__(self, train_state: KerasTrainState) -> None:
        self._train_state = train_state

    def state(self) -> dict[str, Any]:
        state = super().state()
        for name, seeds in self._seeds().items():
            state[name] = [np.array(variable.numpy()) for variable in seeds]
        if (shared := get_global_attribute("global_seed_generator")) is not None:
            state["keras_global"] = np.array(shared.state.numpy())
        return state

    def set(self, state: Mapping[str, Any]) -> None:
        text = "The state has %d random seeds in %s, but the operator has %d. None is loaded."
        for name, own in self._seeds().items():
            if (number := len(state.get(name, ()))) == len(own):
                for variable, seed in zip(own, state[name], strict=True):
                    variable.assign(np.asarray(seed))
            elif name in state:
                self._train_state.settings.warn_once(name, text, number, name, len(own))
        if "keras_global" in state:
            global_seed_generator().state.assign(np.asarray(state["keras_global"]))
        super().set(state)  # last, because a new generator of Keras draws its seed from Python's

    def _seeds(self) -> dict[str, list[Any]]:
        models = {id(seed): seed for seed in _seeds_of(self._train_state.models)}
        own = (seed for each in self._train_state.attributes.values() for seed in _seeds_of(each))
        others = {id(seed): seed for seed in own if id(seed) not in models}
        return {"keras_models": list(models.values()), "keras_others": list(others.values())}


def learning_rate_of(optimizer: Any) -> Any:
    rate = (getattr(optimizer, "inner_optimizer", None) or optimizer).learning_rate
    return rate if hasattr(rate, "assign") else None  # a schedule returns a tensor


def _seeds_of(value: Any) -> Iterator[Any]:
    if isinstance(value, keras.random.SeedGenerator):
        yield value.state
    elif isinstance(value, keras.Layer):
        weights = {id(variable) for variable in value.weights}
        yield from (v for v in value.variables if id(v) not in weights)
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _seeds_of(each)
