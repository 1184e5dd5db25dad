"""The training state of a Keras operator."""

from __future__ import annotations

import contextlib
import inspect
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from raysgd._internal.nested import try_copy
from raysgd.errors import ReplicasDifferError
from raysgd.loop.differences import compare, cpu_model, format_values, hash_of, minority_of
from raysgd.loop.state_schema import check_objects
from raysgd.loop.train_state import TrainState
from raysgd.tf.communication import Communication
from raysgd.tf.engine import NEXT_PHASE, Engine
from raysgd.tf.features import Averages, KerasOptimization, ReplicaSync
from raysgd.tf.keras import (
    named_arrays,
    overrides,
    portable,
    set_arrays,
    set_trainable,
    trainable_parts,
)
from raysgd.tf.layer_state import layer_states, layers_problem, set_layer_states
from raysgd.tf.loading import KerasSources
from raysgd.tf.losses import BatchMetrics, mergeable, own_metrics
from raysgd.tf.options import TFSettings

_RATE = re.compile("'learning_rate': [^,}]*")


class KerasTrainState(TrainState):
    """The registered models, optimizers, and losses, and the position in the data."""

    settings: TFSettings
    data: KerasSources

    def __init__(self, settings: TFSettings, communication: Communication) -> None:
        super().__init__(settings, settings.options.seed)
        self.data = KerasSources(settings, self.seed)
        self.communication = communication
        self.engine = Engine()
        self.criterion: Any = None
        self.metrics: BatchMetrics | None = None
        self._losses: list[Any] | None = None
        self.class_weight: Mapping[Any, float] = {}
        self.not_finite: list[str] = []  # weights that were not finite before training
        self.compiled: list[Any] = []  # what graphs hold as constants, when `setup` ended
        self.optimization = KerasOptimization(self)
        self.set_features(
            [ReplicaSync(self), self.optimization, self.micro_batching, Averages(self)]
        )

    def compile_arguments(self) -> list[Any]:
        names = ("optimizer", "_compile_loss", "_compile_metrics")
        arguments = [getattr(model, name, None) for model in self.models for name in names]
        for options, rate, _ in map(_options_of, self.optimizers):
            arguments += [options, None if isinstance(rate, float) else rate]
        return arguments

    def check_compiled(self) -> None:
        """Raise an error for a change after `setup` that would have no effect."""
        if self.compile_arguments() != self.compiled:
            raise RuntimeError(
                "A model was compiled after setup, or an attribute of an optimizer was changed, "
                "but TFTrainer trains with the optimizer, loss, and metrics of setup. Only a rate "
                "that is a number can change, by optimizer.learning_rate. Freeze layers by "
                f"layer.trainable. {NEXT_PHASE}"
            )

    def list_trained(self) -> list[tuple[Any, list[Any]]]:
        groups = [self.models] * len(self.optimizers)
        if len(self.models) == len(self.optimizers):
            groups = [[model] for model in self.models]
        return [
            (optimizer, [v for model in models for v in model.trainable_variables])
            for optimizer, models in zip(self.optimizers, groups, strict=True)
        ]

    def unpack(self, batch: Any, training: bool) -> tuple[Any, Any, Any]:
        """Return the features, target, and sample weights, with class weights in training."""
        for metric in own_metrics(self.models[0]):
            metric.reset_state()
        features, target, weights = keras.utils.unpack_x_y_sample_weight(batch)
        if training and self.class_weight:
            weights = _with_class_weight(self.class_weight, target, weights)
        return features, target, weights

    @property
    def model_computes_loss(self) -> bool:
        """Whether the model computes the loss, and not the criterion."""
        model = self.models[0]
        return overrides(model, "compute_loss") or (self.criterion is None and model.compiled)

    def total_loss(
        self, model: Any, features: Any, target: Any, output: Any, weights: Any, training: bool
    ) -> Any:
        """Return the mean loss of a batch, including losses of layers."""
        if self.model_computes_loss:
            arguments = (features, target, output, weights)
            takes = "training" in inspect.signature(model.compute_loss).parameters
            loss = model.compute_loss(*arguments, **({"training": training} if takes else {}))
            return tf.reduce_mean(tf.cast(loss, tf.float32))
        losses = [tf.reduce_sum(tf.cast(loss, tf.float32)) for loss in model.losses]
        if target is not None:
            losses.append(self.criterion(target, output, weights))
        return tf.add_n(losses)

    def measure(self, prefix: str, target: Any, output: Any, weights: Any) -> dict[str, Any]:
        """Return the losses of the outputs and the registered metrics of a batch, by name."""
        assert self.metrics is not None
        if self._losses is None:  # the first batch creates them
            compiled = self.models[0] if self.model_computes_loss else self.criterion.compiled
            self._losses = [each for each in compiled.metrics if each.name.endswith("_loss")]
        values: dict[str, Any] = {each.name: float(each.result()) for each in self._losses}
        for each in self._losses:
            each.reset_state()
        values |= {each.name: mergeable(each, ((), {})) for each in own_metrics(self.models[0])}
        values |= self.metrics.measure(target, output, weights)
        return {f"{prefix}_{name}": value for name, value in values.items()}

    def check_masks(self, masks: Any) -> None:
        if any(mask is not None for mask in tf.nest.flatten(masks)):
            self.warn_of_loss("The model masks its output, and Keras losses skip masked steps.")

    def warn_of_loss(self, what: str) -> None:
        """Warn once if training on several workers differs from training on one."""
        size = self.communication.size
        if size > 1:
            self.settings.warn_once(
                "loss",
                "%s %d workers weight their losses by samples, so updates can differ from updates "
                "of one worker. Use a loss that is a mean over samples.",
                what,
                size,
            )

    # ---- the other workers

    def minima(self, *values: int) -> list[int]:
        return self.communication.minima(values)

    def broadcast(self, make: Callable[[], Any], rank: int) -> Any:
        return self.communication.broadcast(make, rank)

    def compare_update(self, variables: Sequence[Any] = (), lacks_gradient: bool = False) -> bool:
        """Return whether any worker lacks a gradient. Every worker must call this.

        Raise an error if others train other variables, have read other samples, or are at the end
        of an epoch, without variables.
        """
        if self.communication.size == 1:
            return False
        numbers = self.engine.cache(lambda: self._numbers_of(variables), *variables)
        contents = {
            "the samples that they have read": self.data.current.digest,
            "what they train": numbers,
        }
        return self._check_equal(contents, lacks_gradient)

    def _numbers_of(self, variables: Sequence[Any]) -> str:
        own = {id(v): n for n, v in enumerate(v for model in self.models for v in model.weights)}
        return ", ".join(f"variable {own.get(id(v))} {tuple(v.shape)}" for v in variables)

    def check_values(self) -> None:
        """Raise an error if weights or optimizers differ between workers with equal CPUs."""
        if self.communication.size == 1:
            return
        weights = [(v, v.trainable) for model in self.models for v in model.weights]
        states = [(v, True) for optimizer in self.optimizers for v in optimizer.variables]
        digests = {
            f"value {n} of {v.path}": zlib.crc32(v.numpy().tobytes()) if is_trained else "frozen"
            for n, (v, is_trained) in enumerate(weights + states)
        }
        self._check_equal({**digests, "CPU": cpu_model()})

    def _check_equal(self, contents: dict[str, Any], flag: bool = False) -> bool:
        """Raise an error if contents differ between workers. Return whether any has the flag."""
        values = [*contents.values()]  # names may differ between processes
        digest = hash_of(values)
        lowest, of_inverse, found = self.communication.minima([digest, ~digest, -flag])
        if lowest == ~of_inverse:
            return bool(found)
        size = self.communication.size
        reports = [self.broadcast(lambda: values, rank) for rank in range(size)]
        differences = compare([dict(zip(contents, each, strict=False)) for each in reports])
        if differences.keys() == {"CPU"}:
            return False
        names = [f"{name} ({format_values(values)})" for name, values in differences.items()]
        message = (
            f"After step {self.global_step}, the workers differ in: {'; '.join(names[:5])}. Common "
            "causes: code that changes them on one worker only; data of other lengths, or in other "
            "orders, such as deterministic=False, shuffles without a seed, and names from a set; "
            "data that each worker selects itself, without TFTrainer(add_dist_sampler=False). "
            "Correct the cause, and load a checkpoint or the state of worker 0: "
            "trainer.load_state_dict(trainer.state_dict())."
        )
        if "CPU" in differences:
            self.settings.warn_once("cpus", "%s Or rounding: their CPUs differ.", message)
            return False
        raise ReplicasDifferError(message, ranks=minority_of(differences, size))

    def copy_training_state(self, leader_rank: int, follows: bool) -> None:
        state = self.broadcast(self.training_state, leader_rank)
        if follows:
            self.load_training_state(state)

    # ---- state

    def copy_leaf(self, leaf: Any, on_host: bool = False, may_alias: bool = False) -> Any:
        if hasattr(leaf, "numpy"):  # a tensor or a variable
            return np.array(leaf.numpy())
        if hasattr(leaf, "__array__") and not isinstance(leaf, np.ndarray | np.generic):
            return np.array(leaf)
        return try_copy(leaf)

    def whole_models(self) -> list[Any]:
        with self.evaluating():
            return [portable(model) for model in self.models]

    def user_settings(self) -> Any:
        return self.trainable(), [_options_of(optimizer) for optimizer in self.optimizers]

    def trainable(self) -> list[dict[str, bool]]:
        return [trainable_parts(model) for model in self.models]

    def training_state(self) -> dict[str, Any]:
        return {
            "models": [named_arrays(model.weights) for model in self.models],
            "layers": [layer_states(model) for model in self.models],
            "trainable": self.trainable(),
            "optimizers": [named_arrays(optimizer.variables) for optimizer in self.optimizers],
        } | ({"not_finite": self.not_finite} if self.not_finite else {})

    def check_training_state(self, state: dict[str, Any]) -> None:
        weights = [model.weights for model in self.models]
        check_objects("models", weights, state.get("models"), _variables_problem)
        check_objects("layers", self.models, state.get("layers"), layers_problem)
        trainable = self.trainable()
        check_objects("trainable", trainable, state.get("trainable", trainable), _trainable_problem)
        variables = [optimizer.variables for optimizer in self.optimizers]
        check_objects("optimizers", variables, state.get("optimizers"), _variables_problem)

    def load_training_state(self, state: dict[str, Any]) -> None:
        if any(state["layers"]):
            self.engine = Engine()  # graphs hold the old tensors and tables
        for model, layers, arrays in zip(
            self.models, state["layers"], state["models"], strict=True
        ):
            set_layer_states(model, layers)
            set_arrays(model.weights, arrays)
        if "trainable" in state:  # older files lack it
            for model, values in zip(self.models, state["trainable"], strict=True):
                set_trainable(model, values)
        for optimizer, arrays in zip(self.optimizers, state["optimizers"], strict=True):
            set_arrays(optimizer.variables, arrays)
        self.transaction.is_damaged = False


def _options_of(optimizer: Any) -> tuple[str, Any, list[str]]:
    """Return an optimizer's options without rates, its rate, and rates of optimizers in it."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rate, options = inner._learning_rate, ""
    with contextlib.suppress(NotImplementedError, TypeError):  # a rate without get_config
        options = str(inner.get_config())
    rate = float(rate) if hasattr(rate, "numpy") else rate
    return _RATE.sub("", options), rate, _RATE.findall(options)


def _with_class_weight(class_weight: Mapping[Any, float], target: Any, sample_weight: Any) -> Any:
    """Return sample weights times the weight of each target's class, which is 1 by default."""
    if tf.nest.is_nested(target) or target is None:
        raise ValueError(
            "register(class_weight=...) is for models with one target. Yield batches "
            "(x, y, sample_weight) instead."
        )
    classes = np.asarray(target)
    if classes.ndim > 1:
        one_hot = classes.shape[-1] > 1
        classes = classes.argmax(axis=-1) if one_hot else classes[..., 0]
    factors = [class_weight.get(each, 1.0) for each in classes.round().astype(int).ravel().tolist()]
    weights = np.asarray(factors, np.float32).reshape(classes.shape)
    if sample_weight is None:
        return weights
    sample_weight = np.asarray(sample_weight, np.float32)
    return weights.reshape(sample_weight.shape) * sample_weight


def _trainable_problem(own: Mapping[str, bool], saved: Mapping[str, bool]) -> str:
    fits = len(own) == len(saved)
    return "" if fits else f"it has {len(saved)} layers and variables, not {len(own)}"


def _variables_problem(variables: list[Any], arrays: Mapping[str, Any]) -> str:
    if len(arrays) != len(variables):
        return f"it has {len(arrays)} variables, not {len(variables)}"
    for variable, (name, array) in zip(variables, arrays.items(), strict=True):
        shape, expected = np.shape(array), tuple(variable.shape)
        if shape != expected:
            return f"{name} has the shape {shape}, not {expected}"
    return ""
