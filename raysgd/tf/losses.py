"""Losses and metrics of Keras, as means over a worker's own batch."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from raysgd.metrics import NUM_SAMPLES, MergeableMetric, Sums, ratio
from raysgd.tf.keras import overrides
from raysgd.tf.layer_state import flat_layers


class BatchLosses:
    """Computes what a batch of the registered model reports: its loss, and its metrics.

    `criterion` and `metrics` have any form that ``compile()`` takes. None means those of the
    compiled `model`.
    """

    def __init__(
        self, model: Any, criterion: Any, metrics: Any, class_weight: Mapping[Any, float]
    ) -> None:
        self._model = model
        shell = _compile(model, criterion, metrics)
        self.criterion: Any = None if criterion is None else partial(_mean_loss, shell)
        _, losses, _ = compiled_objects(model if self.uses_model_loss else shell)
        # The first batch of a model with several outputs fills this list.
        self._losses_of_outputs: list[Any] = getattr(losses, "metrics", [])
        self._compiled_metrics = compiled_objects(model if metrics is None else shell)[-1]
        self._metric_names: list[str] = []
        self._checked: set[str] = set()
        """Metrics whose state is known to be a sum over batches."""
        self._class_weight = class_weight
        layers = flat_layers(model)
        self._stateful_layers = [
            each for each in layers if isinstance(each, keras.layers.RNN) and each.stateful
        ]

    @property
    def uses_model_loss(self) -> bool:
        """Whether the model computes the loss, and not the criterion."""
        has_own = overrides(self._model, "compute_loss")
        return has_own or (self.criterion is None and self._model.compiled)

    def unpack(self, batch: Any, training: bool) -> tuple[Any, Any, Any]:
        """Return the features, target, and sample weights, with class weights in training.

        Raises:
            ValueError: If a stateful layer keeps states of another number of rows.
        """
        for metric in [*inner_metrics(self._model), *self._losses_of_outputs]:
            metric.reset_state()  # steps of users update them too
        features, target, weights = unpacked = keras.utils.unpack_x_y_sample_weight(batch)
        for layer in self._stateful_layers:
            kept = {state.shape[0] for state in tf.nest.flatten(layer.states or [])}
            if kept - {count_samples(unpacked)}:
                raise ValueError(
                    f"{layer.name!r} keeps states of {max(kept)} rows, but the batch has "
                    f"{count_samples(unpacked)}. Pass batches of one size, such as "
                    "dataset.batch(n, drop_remainder=True)."
                )
        if training and self._class_weight:
            weights = _multiply_weights(self._class_weight, target, weights)
        return features, target, weights

    def compute_loss(
        self, features: Any, target: Any, output: Any, weights: Any, training: bool
    ) -> Any:
        """Return the loss of a batch, including losses of layers. It may be one of each sample."""
        model = self._model
        if target is None and not (model.losses or overrides(model, "compute_loss")):
            raise ValueError(
                "A batch has no target. Register batches (x, y), or the tuple (x, y) of all arrays."
            )
        if self.uses_model_loss:
            arguments = (features, target, output, weights)
            takes = "training" in inspect.signature(model.compute_loss).parameters
            loss = model.compute_loss(*arguments, **({"training": training} if takes else {}))
            return tf.cast(loss, keras.config.floatx())
        losses = [tf.reduce_sum(loss) for loss in model.losses]
        if target is not None:
            losses.append(self.criterion(target, output, weights))
        return tf.add_n([tf.cast(loss, keras.config.floatx()) for loss in losses])

    def compute_metrics(self, prefix: str, loss: Any, unpacked: Any, output: Any) -> dict[str, Any]:
        """Return what a batch reports: its loss, losses of the outputs, and registered metrics.

        `unpacked` is the result of `unpack`.
        """
        _, target, weights = unpacked
        values: dict[str, Any] = {e.name: float(e.result()) for e in self._losses_of_outputs}
        values |= {each.name: to_mergeable(each, ((), {})) for each in inner_metrics(self._model)}
        values |= self._measure_metrics(target, output, weights)
        named = {f"{prefix}_{name}": value for name, value in values.items()}
        loss = tf.reduce_mean(loss)
        return {f"{prefix}_loss": loss, NUM_SAMPLES: count_samples(unpacked), **named}

    def _measure_metrics(
        self, target: Any, output: Any, sample_weight: Any
    ) -> dict[str, MergeableMetric]:
        """Return the registered metrics of one batch, in a form that merges exactly."""
        compiled = self._compiled_metrics
        if compiled is None:
            return {}
        tensors = _map_nest(tf.convert_to_tensor, [target, output, sample_weight])
        if not self._metric_names:
            compiled.update_state(*tensors)  # the first batch creates the metrics
            self._metric_names = _strip_numbers(compiled.result(), compiled.metrics)
        values: dict[str, MergeableMetric] = {}
        updates = [(metric, metric.update_state) for metric in compiled.metrics]
        try:
            for name, (metric, update) in zip(self._metric_names, updates, strict=True):
                metric.update_state = partial(self._update_metric, values, name, metric, update)
            compiled.update_state(*tensors)
        finally:
            for metric, update in updates:
                metric.update_state = update
        return values

    def _update_metric(
        self, values: Any, name: str, metric: Any, update: Any, *arguments: Any, **named: Any
    ) -> None:
        updated = partial(update, *arguments, **named)
        owner = next(kind for kind in type(metric).__mro__ if "update_state" in vars(kind))
        is_of_user = not owner.__module__.startswith("keras.")
        if is_of_user and name not in self._checked and _prove_sum(metric, updated):
            self._checked.add(name)
        _reset(metric)
        updated()
        values[name] = to_mergeable(metric, (arguments, named))


def count_samples(unpacked: Any) -> int:
    features, target, _ = unpacked
    leaves = [leaf for leaf in tf.nest.flatten([target, features]) if leaf is not None]
    return int(leaves[0].shape[0])


def _compile(model: Any, criterion: Any, metrics: Any) -> Any:
    """Return a compiled model without layers, which computes losses and metrics like ``fit()``."""
    shell = keras.Model(name="compiled")
    if names := getattr(model, "output_names", None):
        shell.output_names = list(names)
    is_single = metrics is not None and not isinstance(metrics, list | tuple | dict)
    shell.compile("sgd", loss=criterion, metrics=[metrics] if is_single else metrics)
    return shell


def _mean_loss(compiled: Any, target: Any, output: Any, sample_weight: Any = None) -> Any:
    """Return the mean loss of a worker's batch."""
    tensors = _map_nest(tf.convert_to_tensor, [target, output, sample_weight])
    return tf.reduce_mean(compiled.compute_loss(None, *tensors))


def compiled_objects(model: Any) -> list[Any]:
    """Return the optimizer, the loss, and the metrics that ``compile`` has set, or None."""
    names = ("optimizer", "_compile_loss", "_compile_metrics")  # Keras has no public names
    return [getattr(model, name, None) for name in names]


def losses_without_means(criterion: Any) -> list[str]:
    """Return the losses that are not means over samples, as text."""
    losses = []
    for loss in tf.nest.flatten(criterion):
        name = getattr(loss, "__name__", loss if isinstance(loss, str) else type(loss).__name__)
        if getattr(loss, "reduction", None) in ("sum", "mean_with_sample_weight"):
            losses.append(f"{name}(reduction={loss.reduction!r})")
        elif getattr(loss, "ignore_class", None) is not None:
            losses.append(f"{name}(ignore_class={loss.ignore_class!r})")
        elif name.lower() in ("dice", "tversky", "circle"):  # the samples of a batch interact
            losses.append(name)
    return losses


def _multiply_weights(class_weight: Mapping[Any, float], target: Any, sample_weight: Any) -> Any:
    """Return sample weights times the weight of each target's class, which is 1 by default."""
    if tf.nest.is_nested(target) or target is None:
        raise ValueError(
            "register(class_weight=...) is for models with one target. Yield batches "
            "(x, y, sample_weight) instead."
        )
    classes = np.asarray(target)
    if classes.ndim > 1:
        classes = classes.argmax(axis=-1) if classes.shape[-1] > 1 else classes[..., 0]
    factors = [class_weight.get(each, 1.0) for each in classes.round().astype(int).ravel().tolist()]
    weights = np.asarray(factors, keras.config.floatx()).reshape(classes.shape)
    if sample_weight is not None:
        own = np.asarray(sample_weight, weights.dtype)
        weights = weights.reshape(own.shape) * own
    return weights


def inner_metrics(model: Any) -> list[Any]:
    """Return the metrics that the model and its layers update themselves."""
    inner = [each for each in flat_layers(model) if not isinstance(each, keras.Model)]
    # The public list of a layer has those of inner layers, and that of a model those of `compile`.
    return [metric for layer in [model, *inner] for metric in layer._metrics]


def to_mergeable(metric: Any, arguments: Any) -> MergeableMetric:
    if isinstance(metric, keras.metrics.Mean) and type(metric).result is keras.metrics.Mean.result:
        return Sums(ratio, total=float(metric.total.numpy()), weight=float(metric.count.numpy()))
    return MergeableKerasMetric(metric, arguments)


def _map_nest(function: Callable[[Any], Any], nest: Any) -> Any:
    """Call a function for each leaf of a nest that is not None."""
    return tf.nest.map_structure(lambda leaf: None if leaf is None else function(leaf), nest)


def _strip_numbers(names: Any, metrics: list[Any]) -> list[str]:
    """Remove the numbers that Keras appends to repeated names, as in auc_7."""
    stable: list[str] = []
    for name, metric in zip(names, metrics, strict=True):
        kind = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(metric).__name__).lower()
        name = re.sub(rf"((?:^|_){kind})_\d+$", r"\1", name)
        numbered = (f"{name}_{number}" for number in range(1, len(stable) + 1))
        stable.append(next(n for n in (name, *numbered) if n not in stable))
    return stable


def _reset(metric: Any) -> None:
    for variable in metric.variables:  # reset_state may miss some variables
        variable.assign(tf.zeros_like(variable))
    metric.reset_state()


def _prove_sum(metric: Any, update: Callable[[], Any]) -> bool:
    """Check that the state of a metric after two updates is twice the state after one.

    Return False if a variable is still zero, because the check then proves nothing.

    Raises:
        TypeError: If the state is not a sum.
    """
    update()  # the first update may create variables
    _reset(metric)
    states = []
    for _ in range(3):
        states.append([np.array(variable.numpy(), np.float64) for variable in metric.variables])
        update()
    starts, once, twice = states
    adds_up = bool(once) and all(
        not start.any() and np.allclose(second, 2 * first, rtol=1e-3, equal_nan=True)
        for start, first, second in zip(starts, once, twice, strict=True)
    )
    if not adds_up:
        raise TypeError(
            f"The state of the metric {metric.name!r}, a {type(metric).__name__}, is not a sum "
            "over batches, so raysgd cannot merge it. Keep the state in variables that add up, or "
            "return a raysgd.metrics.MergeableMetric from validate_batch."
        )
    return all(first.any() for first in once)


class MergeableKerasMetric(MergeableMetric):
    """A Keras metric that is not a mean. Its variables add up, and Keras computes the result.

    Args:
        metric: A metric whose variables are sums over samples, such as AUC.
        arguments: Arguments of ``update_state``: a tuple and a dict.
    """

    def __init__(self, metric: Any, arguments: Any) -> None:
        self._specs = _map_nest(lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), arguments)
        config = metric.get_config().items()  # the lists that Keras tracks do not travel
        self._config = type(metric), {k: [*v] if isinstance(v, list) else v for k, v in config}
        self._sums = [np.array(variable.numpy(), np.float64) for variable in metric.variables]

    def merge(self, other: MergeableKerasMetric) -> MergeableKerasMetric:
        merged = copy.copy(self)
        merged._sums = [a + b for a, b in zip(self._sums, other._sums, strict=True)]
        return merged

    def compute(self) -> Any:
        kind, config = self._config
        metric = kind.from_config(config)
        if len(metric.variables) != len(self._sums):  # F1Score creates variables in the first batch
            arguments, named = _map_nest(lambda spec: tf.zeros(spec.shape, spec.dtype), self._specs)
            metric.update_state(*arguments, **named)
        for variable, value in zip(metric.variables, self._sums, strict=True):
            variable.assign(tf.cast(value, variable.dtype))
        result = metric.result()
        if isinstance(result, dict):
            return {f"_{name}": float(value) for name, value in result.items()}
        return np.asarray(result)
