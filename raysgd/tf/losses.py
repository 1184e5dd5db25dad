"""Losses and metrics of both Kerases, as plain means over a worker's own batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from raysgd.metrics import MergeableMetric, Sums, ratio

__all__ = ["KerasMetric", "MeanLoss", "accuracy", "batch_metric", "loss_function", "own_metrics"]


def loss_function(keras: Any, criterion: Any) -> MeanLoss:
    """Return a function of (target, output) that gives the mean loss of a batch.

    Args:
        keras: ``keras`` or ``tf_keras``.
        criterion: a loss of Keras, its name, or any function of (target, output).
    """
    if isinstance(criterion, str | dict):
        criterion = keras.losses.get(criterion)
    if isinstance(criterion, type):
        criterion = criterion()
    if isinstance(criterion, MeanLoss):
        return criterion
    if not callable(criterion):
        raise TypeError(f"register(criterion=...) must be callable, but it is {criterion!r}.")
    if inspect.isfunction(criterion) and criterion.__module__.startswith(f"{keras.__name__}."):
        # Keras's own function, or its name: as compile() takes it, with masks and alike ranks
        wrapper = keras.losses.MeanSquaredError.__base__
        criterion = wrapper(criterion, name=criterion.__name__)
    return MeanLoss(criterion, of_keras=isinstance(criterion, keras.losses.Loss))


class MeanLoss:
    """A loss as a plain mean over a worker's own batch; what is read of it is the loss's own.

    Keras's own loss objects divide by the number of workers under a strategy, or refuse to work
    there; so their values for each sample are averaged here.

    Args:
        criterion: a loss of Keras, or any function of (target, output).
        of_keras: whether it is a loss of Keras.
    """

    def __init__(self, criterion: Callable[..., Any], of_keras: bool) -> None:
        self._criterion, self._of_keras = criterion, of_keras

    def __call__(self, target: Any, output: Any, *others: Any, **named: Any) -> Any:
        """Return the mean loss; what else is given, such as sample weights, goes to the loss."""
        criterion, mask = self._criterion, None
        output = tf.nest.map_structure(_widened, output)
        if self._of_keras:
            summed = str(getattr(criterion, "reduction", "")).lower() in ("sum", "reduction.sum")
            if not summed:
                criterion, mask = _unreduced(criterion), getattr(output, "_keras_mask", None)
        values = criterion(target, output, *others, **named)
        mean = tf.reduce_mean(tf.cast(values, tf.float32))
        if mask is None:
            return mean
        # what is masked is 0 by now, and does not count
        return tf.math.divide_no_nan(mean, tf.reduce_mean(tf.cast(mask, tf.float32)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._criterion, name)


def _widened(tensor: Any) -> Any:
    """Return a tensor in float32 where it was float16 or bfloat16, in which losses overflow."""
    if getattr(tensor, "dtype", None) not in (tf.float16, tf.bfloat16):
        return tensor
    widened = tf.cast(tensor, tf.float32)
    mask = getattr(tensor, "_keras_mask", None)
    if mask is not None:
        widened._keras_mask = mask
    return widened


def _unreduced(criterion: Any) -> Any:
    """Return a copy of a loss of Keras that gives a value for each sample."""
    made = object.__new__(type(criterion))  # copy.copy writes and reads a config, or fails to
    vars(made).update(vars(criterion), reduction="none")
    return made


def accuracy(target: Any, output: Any) -> float | None:
    """Return the share of samples whose largest entry, along the last axis, is the target.

    None where the shapes do not allow it: (batch, ..., classes) and whole numbers (batch, ...).
    """
    output, target = np.asarray(output), np.asarray(target)
    if output.ndim < 2 or target.dtype.kind not in "iu":
        return None
    if target.shape == (*output.shape[:-1], 1):
        target = target[..., 0]
    if target.shape != output.shape[:-1] or not target.size:
        return None
    return float((output.argmax(axis=-1) == target).mean())


def own_metrics(keras: Any, given: list[Any], target: Any, output: Any) -> list[Any]:
    """Return metric objects that belong to this worker alone, made like those that were given.

    Those that are made under a strategy would talk to the other workers when they are read.
    """
    made = []
    for each in given:
        name = "accuracy" if isinstance(each, str) and each in ("accuracy", "acc") else None
        if name is not None:
            each = _accuracy_for(target, output)
        metric = keras.metrics.get(each) if isinstance(each, str) else each
        if isinstance(metric, keras.metrics.Metric):
            named = {"name": name} if name else {}
            made.append(type(metric).from_config({**metric.get_config(), **named}))
        elif callable(metric):
            name = name or getattr(metric, "__name__", type(metric).__name__)
            made.append(keras.metrics.MeanMetricWrapper(metric, name=name))
        else:
            raise TypeError(f"register(metrics=...) must be metrics of Keras, but got {each!r}.")
    return made


def _accuracy_for(target: Any, output: Any) -> Any:
    """Return the accuracy that fits the shapes, as ``compile(metrics=["accuracy"])`` does."""
    if output.shape[-1] == 1:
        return "binary_accuracy"
    same = len(target.shape) == len(output.shape) and target.shape[-1] == output.shape[-1]
    return "categorical_accuracy" if same else "sparse_categorical_accuracy"


def batch_metric(keras: Any, metric: Any, target: Any, output: Any) -> MergeableMetric:
    """Return what a metric says about one batch, so that it can be merged exactly."""
    for variable in metric.variables:  # some forget a part in reset_state
        variable.assign(tf.zeros_like(variable))
    metric.reset_state()
    metric.update_state(target, output)
    mean = keras.metrics.Mean
    if isinstance(metric, mean) and type(metric).result is mean.result:  # no root of one
        return Sums(ratio, total=float(metric.total.numpy()), weight=float(metric.count.numpy()))
    spec = [tf.nest.map_structure(_shape_and_type, each) for each in (target, output)]
    return KerasMetric(keras.__name__, metric, spec)


def _shape_and_type(tensor: Any) -> tf.TensorSpec:
    return tf.TensorSpec(tensor.shape, tensor.dtype)


class KerasMetric(MergeableMetric):
    """A metric of Keras that is no mean: counts that add up, and what Keras makes of them.

    Args:
        flavor: "keras" or "tf_keras".
        metric: a metric whose variables are sums over samples, as those of AUC and Precision are.
        spec: the shapes and types of a target and an output.
    """

    def __init__(self, flavor: str, metric: Any, spec: Any) -> None:
        self._flavor, self._spec = flavor, spec
        self._config = (type(metric), metric.get_config())
        self._sums = [np.array(variable.numpy(), np.float64) for variable in metric.variables]

    def merge(self, other: KerasMetric) -> KerasMetric:
        """Add the counts."""
        merged = KerasMetric.__new__(KerasMetric)
        merged._flavor, merged._spec = self._flavor, self._spec
        merged._config = self._config
        pairs = zip(self._sums, other._sums, strict=True)
        merged._sums = [left + right for left, right in pairs]
        return merged

    def compute(self) -> float | dict[str, float]:
        """Let Keras compute it: a number, or one for each class by its place, ``_0``, ``_1``."""
        kind, config = self._config
        metric = kind.from_config(config)
        if len(metric.variables) != len(self._sums):  # F1Score and others make them of a batch
            zeros = [tf.nest.map_structure(_zeros, each) for each in self._spec]
            metric.update_state(*zeros)
        for variable, value in zip(metric.variables, self._sums, strict=True):
            variable.assign(tf.cast(value, variable.dtype))
        result = np.asarray(metric.result(), np.float64)
        if result.ndim == 0:
            return float(result)
        return {f"_{index}": float(value) for index, value in enumerate(result.ravel())}


def _zeros(spec: tf.TensorSpec) -> Any:
    return tf.zeros(spec.shape, spec.dtype)
