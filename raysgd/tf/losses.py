"""Losses and metrics of both Kerases, as plain means over a worker's own batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from raysgd.metrics import MergeableMetric, Sums, ratio

__all__ = ["KerasMetric", "MeanLoss", "accuracy", "batch_metric", "loss_function", "made_metrics"]


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
    return MeanLoss(criterion)


class MeanLoss:
    """A loss as one number, a worker's mean over its batch; what is read of it is the loss's own.

    Args:
        criterion: a loss of Keras, or any function of (target, output).
    """

    def __init__(self, criterion: Callable[..., Any]) -> None:
        self._criterion = criterion

    def __call__(self, target: Any, output: Any, *others: Any, **named: Any) -> Any:
        """Return the mean loss; what else is given, such as sample weights, goes to the loss."""
        output = tf.nest.map_structure(_widened, output)
        values = self._criterion(target, output, *others, **named)
        return tf.reduce_mean(tf.cast(values, tf.float32))

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


def made_metrics(keras: Any, given: list[Any], target: Any, output: Any) -> list[Any]:
    """Return metric objects for what was given: those themselves, names, functions."""
    made = []
    for each in given:
        if isinstance(each, str):
            is_accuracy = each in ("accuracy", "acc")
            each = _accuracy_for(keras, target, output) if is_accuracy else keras.metrics.get(each)
        if isinstance(each, keras.metrics.Metric):
            made.append(each)
        elif callable(each):
            name = getattr(each, "__name__", type(each).__name__)
            made.append(keras.metrics.MeanMetricWrapper(each, name=name))
        else:
            raise TypeError(f"register(metrics=...) must be metrics of Keras, but got {each!r}.")
    return made


def _accuracy_for(keras: Any, target: Any, output: Any) -> Any:
    """Return the accuracy that fits the shapes, as ``compile(metrics=["accuracy"])`` does."""
    if output.shape[-1] == 1:
        return keras.metrics.BinaryAccuracy("accuracy")
    same = len(target.shape) == len(output.shape) and target.shape[-1] == output.shape[-1]
    kind = "CategoricalAccuracy" if same else "SparseCategoricalAccuracy"
    return getattr(keras.metrics, kind)("accuracy")


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
