"""What a TensorFlow operator registered, and where its training stands."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from raysgd._internal.context import WorkerContext
from raysgd._internal.nested import deep_copied, map_leaves
from raysgd.data import Dataset
from raysgd.data.partition import MicroBatch
from raysgd.data.source import BatchSource
from raysgd.loop.operator_base import create_operator
from raysgd.loop.registration import Registration, Settings, check_parts, listed, shaped_like
from raysgd.tf.batches import unpack, with_class_weight
from raysgd.tf.communication import Communication, communication_of
from raysgd.tf.engine import Engine
from raysgd.tf.keras import (
    flavor_of,
    is_keras_model,
    named_arrays,
    overrides,
    policy_name,
    scaled_optimizer,
    set_arrays,
    set_policy,
    tf_variable,
)
from raysgd.tf.loading import (
    ArraySource,
    DatasetSource,
    ItemSource,
    check_end,
    is_arrays,
    spec_of,
)
from raysgd.tf.losses import BatchMetrics, loss_function, widened
from raysgd.tf.options import TFOptions

if TYPE_CHECKING:
    from raysgd.tf.operator import TrainingOperator

__all__ = ["KerasRegistration", "TFSettings", "build_operator", "copied_leaf"]

_DEFAULT_BATCH_SIZE = 32
_NUMBERS = "biufcV"
"""Kinds of NumPy's types that a variable can take; the last is that of bfloat16."""


@dataclass
class TFSettings(Settings):
    """The trainer's arguments, and where this worker is."""

    options: TFOptions = field(default_factory=TFOptions)


class KerasRegistration(Registration):
    """What a Keras operator registered, its state, and the position in the data."""

    settings: TFSettings

    def __init__(self, settings: TFSettings, communication: Communication, seed: int) -> None:
        super().__init__(settings, seed)
        self.communication = communication
        self.engine = Engine()
        self.criterion: Any = None
        self.metrics: BatchMetrics | None = None
        self.class_weight: Mapping[int, float] | None = None
        self.batch_size: int | None = None
        self.shuffle = True
        self._has_stepped = False
        self._held: dict[int, list[Any]] = {}
        # variables that the step under way has changed, with what they were
        self._before: dict[int, tuple[Any, Any]] = {}

    # ---- registering

    def register(
        self, models: Any, optimizers: Any, criterion: Any, metrics: Any, class_weight: Any = None
    ) -> Any:
        """See :meth:`TrainingOperator.register`."""
        self.check_unregistered()
        self.models = listed(models)
        for model in self.models:
            if not is_keras_model(model):
                raise TypeError(
                    "register(models=...) must be one or a list of Keras models, but got "
                    f"{model!r}."
                )
        self.keras = flavor_of(self.models[0])
        if optimizers is None:
            optimizers = self._compiled("optimizer", models)
        self.optimizers = [self._placed(optimizer) for optimizer in listed(optimizers)]
        self.step.optimizers = self.optimizers
        model = self.models[0]
        if criterion is not None:
            self.criterion = loss_function(self.keras, criterion, model)
        elif (criterion := getattr(model, "loss", None)) is not None:
            held = getattr(model, "_compile_loss", None) or model.compiled_loss
            # no public attribute has the weights
            weights = getattr(held, "_user_loss_weights", None)
            self.criterion = loss_function(self.keras, criterion, model, weights, as_compiled=True)
        if class_weight is not None and not isinstance(class_weight, Mapping):
            raise TypeError(
                "register(class_weight=...) must be a dict of weights by class, but it is "
                f"{class_weight!r}."
            )
        self.class_weight = class_weight
        self.metrics = BatchMetrics(self.keras, model, metrics)
        self.registered = True
        given = [shaped_like(models, self.models), shaped_like(optimizers, self.optimizers)]
        return tuple(
            given
            + ([self.criterion] if self.criterion is not None else [])
            + ([metrics] if metrics is not None else [])
        )

    def _placed(self, optimizer: Any) -> Any:
        if isinstance(optimizer, str | dict):
            optimizer = self.keras.optimizers.get(optimizer)
        if not hasattr(optimizer, "apply_gradients"):
            raise TypeError(
                "register(optimizers=...) must be one or a list of optimizers of Keras, but got "
                f"{optimizer!r}."
            )
        if type(optimizer).__module__.startswith("horovod"):
            raise TypeError(
                "register(optimizers=...) got Horovod's DistributedOptimizer. TFTrainer exchanges "
                "gradients itself, with backend='horovod' through Horovod; with Keras 3 Horovod's "
                "optimizer does not synchronize in fit(), and says nothing. Pass the optimizer "
                "that you gave it."
            )
        if not hasattr(optimizer, "build"):
            name = type(optimizer).__name__
            raise TypeError(
                f"register(optimizers=...) got a legacy optimizer, {name}. Use "
                f"tf_keras.optimizers.{name}."
            )
        return scaled_optimizer(self.keras, optimizer, self.settings.options.use_fp16)

    def _compiled(self, name: str, models: Any) -> Any:
        found = getattr(self.models[0], name, None)
        if isinstance(models, list | tuple) or found is None:
            raise ValueError(
                f"register(models=..., {name}s=None) takes one model that has been compiled: call "
                f"model.compile({name}=..., loss=...) before, or pass {name}s."
            )
        return found

    def complete(self) -> None:
        """Build what was registered unbuilt, once the data is known.

        Raises:
            RuntimeError: if a model cannot be built without data.
        """
        if any(not model.built for model in self.models) and len(self.models) == 1:
            sources = map(self.data.readable, filter(self.data.has, ("train", "validation")))
            source = next(sources, None)
            spec = None if source is None else spec_of(source)
            if spec is not None:
                features, *_ = unpack(spec, self.models[0])
                self.models[0](tf.nest.map_structure(_sample_of, features))
        for model in self.models:
            if not model.built:
                raise RuntimeError(
                    f"The model {model.name!r} has no variables yet. Give it an Input layer, call "
                    "it once in setup, or register the data that it is for."
                )
        for optimizer, variables in self._trained():
            if not getattr(optimizer, "built", False):
                optimizer.build(variables)

    def _trained(self) -> list[tuple[Any, list[Any]]]:
        """Return each optimizer with the variables that it is for."""
        pairs = len(self.models) == len(self.optimizers)
        trained = [
            self.models[i : i + 1] if pairs else self.models for i in range(len(self.optimizers))
        ]
        return [
            (optimizer, [v for model in models for v in model.trainable_variables])
            for optimizer, models in zip(self.optimizers, trained, strict=True)
        ]

    # ---- data

    def wrap(self, loader: Any, training: bool) -> BatchSource:
        """Return the source of batches for a data set, arrays, or another iterable."""
        share, placing = self.settings.batch_share, self.settings.placing
        if isinstance(loader, Dataset):
            return ItemSource(loader, **placing)
        if is_arrays(loader):
            return ArraySource(
                loader,
                training=training,
                batch_size=self.batch_size or share or _DEFAULT_BATCH_SIZE,
                shuffle=self.shuffle,
                seed=self.seed,
                follows_share=share is not None and self.batch_size in (None, share),
                **placing,
            )
        if isinstance(loader, tf.data.Dataset) and self.settings.options.add_dist_sampler:
            splits = self.settings.options.splits_batches
            del placing["global_batch"]  # its batches are made already
            return DatasetSource(loader, training=training, splits=splits, **placing)
        why_whole = "it is neither arrays nor a tf.data.Dataset"
        return BatchSource(
            loader, by_user=not self.settings.options.add_dist_sampler, why_whole=why_whole
        )

    # ---- steps

    def begin_batch(self, place: MicroBatch) -> None:
        super().begin_batch(place)
        if place.position > 0 and not self._held:
            self.parts.refuse("train_batch does not call self.minimize()", place)
        self._has_stepped = False

    def update(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
        """Average gradients and update, on all workers or on none.

        A gradient is None where this worker's batch does not depend on the variable. Those of a
        part of a batch are kept until the last part is there.
        """
        place = self.place
        if self._has_stepped:
            self.parts.refuse("train_batch calls self.minimize() several times", place)
        self._has_stepped = True
        if place.size is not None:
            weight = place.size / place.total * place.share if place.size else 0.0
            gradients = gradients if weight == 1.0 else [_scaled(g, weight) for g in gradients]
        if place.is_part:
            held = self._held.get(id(optimizer))
            gradients = gradients if held is None else list(map(_added, held, gradients))
            self._held[id(optimizer)] = gradients
        if not place.is_last:
            return
        if self.communication.size > 1:
            gradients = self.communication.completed(gradients, variables)
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        means = self.communication.mean([gradient for gradient, _ in pairs])
        changed = [variable for _, variable in pairs]
        if len(self.optimizers) > 1:  # one may have made its update when another's step fails
            self._remember([*changed, *_variables_of(optimizer), *_loss_scale_of(optimizer)])
        self.step.begin_update(optimizer)
        self.engine.update(optimizer, means, changed)
        self.step.end_update(optimizer)

    def _remember(self, variables: list[Any]) -> None:
        for variable in map(tf_variable, variables):
            if id(variable) not in self._before:
                self._before[id(variable)] = variable, tf.identity(variable)

    def commit(self, num_batches: int = 1) -> None:
        self._forget()
        super().commit(num_batches)

    def roll_back(self) -> None:
        """Take back what some optimizers did in a step that was not committed."""
        for variable, value in self._before.values():
            variable.assign(value)
        if self.step.updating is not None and not self._before:
            self.step.is_partial = True
        self._forget()
        super().roll_back()

    def _forget(self) -> None:
        self._held.clear()
        self._before.clear()
        self._has_stepped = False

    def unpacked(self, batch: Any, training: bool) -> tuple[Any, Any, Any]:
        """Return the features, the target and the sample weights of a batch."""
        features, target, weights = unpack(batch, self.models[0])
        if training and self.class_weight is not None:
            weights = with_class_weight(self.class_weight, target, weights)
        return features, target, weights

    def total_loss(
        self, model: Any, features: Any, target: Any, output: Any, weights: Any, training: bool
    ) -> Any:
        """Return the mean loss of a batch and what layers add to it, such as regularization."""
        if overrides(model, "compute_loss"):
            given = (features, target, widened(output), weights)
            takes = "training" in inspect.signature(model.compute_loss).parameters
            loss = model.compute_loss(*given, **({"training": training} if takes else {}))
            return tf.reduce_mean(tf.cast(loss, tf.float32))
        added = _floats(model.losses)
        if self.criterion is None or target is None:
            return tf.add_n(added)
        return tf.add_n([self.criterion.weighted(target, output, weights), *added])

    @property
    def needs_criterion(self) -> bool:
        """Whether there is no loss so far: neither given, nor compiled, nor the model's own."""
        model = self.models[0]
        is_compiled = getattr(model, "optimizer", None) is not None
        return self.criterion is None and not (is_compiled or overrides(model, "compute_loss"))

    def measured(self, prefix: str, target: Any, output: Any, weights: Any) -> dict[str, Any]:
        """Return the losses of several outputs, and the registered metrics of a batch, by name."""
        assert self.metrics is not None
        parts = self.criterion.parts() if self.criterion is not None else {}
        found = {**parts, **self.metrics.measure(target, output, weights)}
        return {f"{prefix}_{name}": value for name, value in found.items()}

    def check_end(self) -> None:
        """Refuse to train a whole epoch of data that have no end."""
        if self.data.has(self.data.trains_on):
            loader = self.data.readable(self.data.trains_on).loader
            check_end(loader, "training", "train(num_steps=...)")

    @contextlib.contextmanager
    def validating(self) -> Iterator[None]:
        """Let the models have the averages of optimizers with ``use_ema``, as after ``fit()``."""
        held = []
        for optimizer, variables in self._trained():
            inner = getattr(optimizer, "inner_optimizer", optimizer)
            if getattr(inner, "use_ema", False) and int(inner.iterations) > 0:
                held += [(tf_variable(v), tf.identity(tf_variable(v))) for v in variables]
                optimizer.finalize_variable_values(variables)
        try:
            yield
        finally:
            for variable, value in held:
                variable.assign(value)

    # ---- the other workers

    def enter(self, context: WorkerContext, batch_share: int | None) -> None:
        super().enter(context, batch_share)
        self.communication = communication_of(context, self.settings.options.use_horovod)

    def minimum(self, value: int) -> int:
        return self.communication.minimum(value)

    def from_rank(self, make: Callable[[], Any], rank: int) -> Any:
        return self.communication.share(make, rank)

    def share_initial_state(self) -> None:
        self.share_training_state(0, follows=True)

    def share_training_state(self, leader: int, follows: bool) -> None:
        state = self.from_rank(self.training_state, leader)
        if follows:
            self.load_training_state(state)

    def sync_buffers(self) -> None:
        """Give every rank the mean of the statistics that are not trained."""
        if self.communication.size == 1:
            return
        held = [tf_variable(v) for model in self.models for v in model.non_trainable_variables]
        floats = [variable for variable in held if variable.dtype.is_floating]
        if floats:
            means = self.communication.mean([tf.identity(variable) for variable in floats])
            for variable, mean in zip(floats, means, strict=True):
                variable.assign(mean)

    # ---- state

    def copy_leaf(self, leaf: Any) -> Any:
        """Return a copy; a tensor becomes an array."""
        return copied_leaf(leaf)

    def to_cpu(self, state: Any) -> Any:
        return map_leaves(state, copied_leaf)

    def settable(self) -> Any:
        return [str(optimizer.get_config()) for optimizer in self.optimizers]

    def training_state(self) -> dict[str, Any]:
        return {
            "models": [named_arrays(_variables_of(m)) for m in self.models],
            "optimizers": [named_arrays(_variables_of(o)) for o in self.optimizers],
            "loss_scales": [named_arrays(_loss_scale_of(o)) for o in self.optimizers],
        }

    def check_training_state(self, state: dict[str, Any]) -> None:
        for name, objects in (("models", self.models), ("optimizers", self.optimizers)):
            check_parts(name, objects, state.get(name), _problem)
        if "loss_scales" in state:  # which an older file has not
            check_parts("loss_scales", self.optimizers, state["loss_scales"], _scale_problem)

    def load_training_state(self, state: dict[str, Any]) -> None:
        for model, arrays in zip(self.models, state["models"], strict=True):
            set_arrays(_variables_of(model), arrays)
        for optimizer, arrays in zip(self.optimizers, state["optimizers"], strict=True):
            set_arrays(_variables_of(optimizer), arrays)
        for optimizer, arrays in zip(self.optimizers, state.get("loss_scales", ()), strict=False):
            if arrays and _loss_scale_of(optimizer):
                set_arrays(_loss_scale_of(optimizer), arrays)
        self.step.is_partial = False


def _scaled(gradient: Any, weight: float) -> Any:
    if gradient is None:
        return None
    factor = tf.cast(weight, gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def _added(left: Any, right: Any) -> Any:
    if left is None or right is None:
        return right if left is None else left
    if not (isinstance(left, tf.IndexedSlices) and isinstance(right, tf.IndexedSlices)):
        return tf.convert_to_tensor(left) + tf.convert_to_tensor(right)
    return tf.IndexedSlices(
        tf.concat([left.values, right.values], 0),
        tf.concat([left.indices, right.indices], 0),
        left.dense_shape,
    )


def _floats(losses: Any) -> list[Any]:
    return [tf.reduce_sum(tf.cast(loss, tf.float32)) for loss in losses]


def _variables_of(thing: Any) -> list[Any]:
    """Return all variables of a model or an optimizer, its learning rate among them."""
    if is_keras_model(thing):
        return list(thing.weights)
    variables = list(thing.variables)
    inner = getattr(thing, "inner_optimizer", None)
    rate = getattr(inner or thing, "_learning_rate", None)
    if isinstance(rate, tf.Variable) and not any(rate is v for v in variables):
        variables.append(rate)  # tf_keras does not list it
    return variables


def _loss_scale_of(optimizer: Any) -> list[Any]:
    """Return the variables of float16's scale that tf_keras does not list among the optimizer's."""
    scale: Any = getattr(optimizer, "_loss_scale", None)
    return [scale.current_loss_scale, scale.counter] if hasattr(scale, "counter") else []


def _sample_of(spec: Any) -> Any:
    shape = [1 if size is None else size for size in spec.shape[1:]]
    return tf.zeros([1, *shape], spec.dtype)


def _scale_problem(optimizer: Any, arrays: Mapping[str, Any]) -> str:
    """Say why a scale cannot be taken; one is left where the other side has none."""
    scale = _loss_scale_of(optimizer)
    return _misfit(scale, arrays) if scale and arrays else ""


def _problem(thing: Any, arrays: Mapping[str, Any]) -> str:
    return _misfit(_variables_of(thing), arrays)


def _misfit(variables: list[Any], arrays: Mapping[str, Any]) -> str:
    if len(arrays) != len(variables):
        return f"{len(arrays)} variables, not {len(variables)}"
    for variable, (name, array) in zip(variables, arrays.items(), strict=True):
        if not hasattr(array, "__array__") or np.asarray(array).dtype.kind not in _NUMBERS:
            return f"{name} is no array of numbers, but {type(array).__name__}"
        found, expected = np.shape(array), tuple(variable.shape)
        if found != expected:
            return f"{name} is of shape {found}, not of shape {expected}"
    return ""


def copied_leaf(leaf: Any) -> Any:
    """Return a copy of what a state holds; tensors and variables become arrays."""
    if hasattr(leaf, "__array__") and not isinstance(leaf, np.ndarray | np.generic):
        # NumPy warns of what TensorFlow's variables do when it is asked for a copy
        return np.array(leaf.numpy() if hasattr(leaf, "numpy") else leaf)
    return deep_copied(leaf)


def build_operator(
    operator_cls: type[TrainingOperator],
    config: Mapping[str, Any],
    settings: TFSettings,
    communication: Communication,
    seed: int,
) -> TrainingOperator:
    """Create an operator and run its ``setup``.

    Raises:
        RuntimeError: if its setup registered nothing, or a model that cannot be built.
    """
    policy = policy_name(settings.options.use_fp16)
    if policy is not None:
        set_policy(policy)
    # data sets that shuffle without a seed of their own do it alike on all workers
    tf.random.set_seed(seed % 2**31)
    registration = KerasRegistration(settings, communication, seed)
    operator: TrainingOperator = create_operator(operator_cls, config, registration)
    operator.setup(operator.config)
    registration.check_registered(operator)
    registration.complete()
    return operator
