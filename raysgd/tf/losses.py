"""Losses and metrics of Keras 3 and tf_keras, as means over a worker's own batch."""

from __future__ import annotations

import copy
import inspect
import re
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from raysgd.metrics import MergeableMetric, Sums, ratio

__all__ = [
    "BatchMetrics",
    "KerasMetric",
    "MeanLoss",
    "accuracy",
    "batch_metric",
    "loss_function",
    "widened",
    "without_means",
]


def loss_function(
    keras: Any,
    criterion: Any,
    model: Any = None,
    loss_weights: Any = None,
    as_compiled: bool = False,
) -> MeanLoss:
    """Return a function of (target, output) that computes the mean loss of a batch.

    Args:
        keras: ``keras`` or ``tf_keras``.
        criterion: Loss in any form that ``compile()`` takes, or a function of (target, output).
        model: The model, which names the outputs.
        loss_weights: Loss weights of ``compile()``.
        as_compiled: Whether Keras must call the loss, even if it is a function.
    """
    if isinstance(criterion, type):
        criterion = criterion()
    if isinstance(criterion, MeanLoss):
        return criterion
    is_by_output = isinstance(criterion, dict) and "class_name" not in criterion
    as_compiled = as_compiled or is_by_output or isinstance(criterion, list | tuple)
    if isinstance(criterion, str | dict) and not as_compiled and criterion not in _BY_SHAPE:
        criterion = keras.losses.get(criterion)
    elif not isinstance(criterion, str | dict | list | tuple) and not callable(criterion):
        raise TypeError(f"register(criterion=...) must be callable, but it is {criterion!r}.")
    if inspect.isfunction(criterion) and criterion.__module__.startswith(f"{keras.__name__}."):
        # Wrap a Keras function or its name like compile() does, to apply masks and match ranks.
        wrapper = keras.losses.MeanSquaredError.__base__
        criterion = wrapper(criterion, name=criterion.__name__)
    compiled = _compiled(keras, model, loss=criterion, loss_weights=loss_weights)
    if as_compiled or criterion in _BY_SHAPE:
        return MeanLoss(criterion, compiled, "always")
    is_keras = isinstance(criterion, keras.losses.Loss)
    return MeanLoss(criterion, compiled, "several outputs" if is_keras else "weights")


_BY_SHAPE = ("crossentropy", "ce")
"""Names of losses that Keras selects by the shapes of target and output."""


def without_means(criterion: Any) -> list[str]:
    """Return the losses that are not means over samples, as text."""
    return [
        f"{type(loss).__name__}(reduction={loss.reduction!r})"
        for loss in tf.nest.flatten(criterion)
        if getattr(loss, "reduction", None) in ("sum", "mean_with_sample_weight")
    ]


def _compiled(keras: Any, model: Any, **arguments: Any) -> Any:
    """Return a compiled model without layers, which computes losses and metrics like ``fit()``."""
    shell = keras.Model(name="compiled")
    names = getattr(model, "output_names", None)
    if names:
        shell.output_names = list(names)
    shell.compile("sgd", **arguments)
    return shell


class MeanLoss:
    """A loss as one number: a worker's mean over its batch. Other attributes are the loss's own.

    Args:
        criterion: The user's loss.
        compiled: A compiled model whose ``compute_loss`` computes it like ``fit()``.
        uses_compiled: When to call `compiled` instead of `criterion`: "always", for "several
            outputs", or only if there are "weights".
    """

    def __init__(self, criterion: Any, compiled: Any, uses_compiled: str) -> None:
        self._criterion, self._compiled = criterion, compiled
        self._uses_compiled = uses_compiled

    def __call__(self, target: Any, output: Any, *others: Any, **named: Any) -> Any:
        """Return the mean loss. Further arguments, such as sample weights, go to the loss."""
        output = widened(output)
        several = self._uses_compiled == "several outputs" and tf.nest.is_nested(output)
        if several or self._uses_compiled == "always":
            return self._as_fit(target, output, *others, **named)
        values = self._criterion(target, output, *others, **named)
        return tf.reduce_mean(tf.cast(values, tf.float32))

    def weighted(self, target: Any, output: Any, sample_weight: Any) -> Any:
        if sample_weight is None:
            return self(target, output)
        return self._as_fit(target, widened(output), sample_weight)

    def _as_fit(self, target: Any, output: Any, sample_weight: Any = None) -> Any:
        values = self._compiled.compute_loss(None, target, output, sample_weight)
        return tf.reduce_mean(tf.cast(values, tf.float32))

    def parts(self) -> dict[str, float]:
        """Return the losses of the outputs since the last call, by name."""
        means = [m for m in self._compiled.metrics if m.name.endswith("_loss")]
        found = {mean.name: float(mean.result()) for mean in means}
        for mean in means:
            mean.reset_state()
        return found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._criterion, name)


def widened(output: Any) -> Any:
    """Convert float16 and bfloat16 outputs to float32, because losses would overflow."""
    return tf.nest.map_structure(_widened, output)


def _widened(tensor: Any) -> Any:
    if getattr(tensor, "dtype", None) not in (tf.float16, tf.bfloat16):
        return tensor
    widened = tf.cast(tensor, tf.float32)
    mask = getattr(tensor, "_keras_mask", None)
    if mask is not None:
        widened._keras_mask = mask
    return widened


def accuracy(target: Any, output: Any) -> float | None:
    """Return the fraction of samples whose argmax along the last axis is the target.

    Return None unless the output has shape (batch, ..., classes) and the target has integers of
    shape (batch, ...).
    """
    if tf.nest.is_nested(target) or tf.nest.is_nested(output):
        return None
    output, target = np.asarray(output), np.asarray(target)
    if output.ndim < 2 or target.dtype.kind not in "iu":
        return None
    if target.shape == (*output.shape[:-1], 1):
        target = target[..., 0]
    if target.shape != output.shape[:-1] or not target.size:
        return None
    return float((output.argmax(axis=-1) == target).mean())


class BatchMetrics:
    """Metrics in every form that ``compile()`` takes, with the names of Keras, batch by batch.

    Args:
        keras: ``keras`` or ``tf_keras``.
        model: The model.
        given: The metrics. None for those of the compiled model.
    """

    def __init__(self, keras: Any, model: Any, given: Any = None) -> None:
        for each in tf.nest.flatten(given) if given is not None else []:
            if each is not None and not isinstance(each, str) and not callable(each):
                raise TypeError(f"register(metrics=...) must be Keras metrics, but got {each!r}.")
        if given is not None:
            given = given if isinstance(given, list | tuple | dict) else [given]
            model = _compiled(keras, model, metrics=given)
        self._keras = keras
        is_keras_3 = hasattr(model, "_compile_metrics")
        self._held = model._compile_metrics if is_keras_3 else model.compiled_metrics
        kinds = ("_user_metrics", "_user_weighted_metrics")
        self._is_empty = not any(getattr(self._held, kind, None) for kind in kinds)
        self._names: list[str] = []

    def measure(self, target: Any, output: Any, sample_weight: Any) -> dict[str, MergeableMetric]:
        if self._is_empty:
            return {}
        given = [_tensors(each) for each in (target, output, sample_weight)]
        if not self._names:
            self._held.update_state(*given)  # the first batch creates the metrics
            is_keras_3 = hasattr(self._held, "output_names")
            names = self._held.result() if is_keras_3 else [m.name for m in self._held.metrics]
            self._names = _stable(names, self._held.metrics)
        found: dict[str, MergeableMetric] = {}
        updates = [(metric, metric.update_state) for metric in self._held.metrics]
        try:
            for name, (metric, update) in zip(self._names, updates, strict=True):
                metric.update_state = partial(self._measure, found, name, metric, update)
            self._held.update_state(*given)
        finally:
            for metric, update in updates:
                metric.update_state = update
        return found

    def _measure(
        self, found: Any, name: str, metric: Any, update: Any, *given: Any, **named: Any
    ) -> None:
        found[name] = batch_metric(self._keras, metric, *given, update=update, **named)


def _tensors(nest: Any) -> Any:
    return tf.nest.map_structure(lambda x: None if x is None else tf.convert_to_tensor(x), nest)


def _stable(names: Any, metrics: list[Any]) -> list[str]:
    """Remove the numbers that Keras appends to repeated names, as in auc_7."""
    stable: list[str] = []
    for name, metric in zip(names, metrics, strict=True):
        kind = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(metric).__name__).lower()
        name = re.sub(rf"((?:^|_){kind})_\d+$", r"\1", name)
        numbered = (f"{name}_{number}" for number in range(1, len(stable) + 1))
        stable.append(next(n for n in (name, *numbered) if n not in stable))
    return stable


_checked = weakref.WeakSet[Any]()
"""Metrics whose state is known to be a sum over batches."""


def batch_metric(
    keras: Any, metric: Any, *given: Any, update: Any = None, **named: Any
) -> MergeableMetric:
    """Return the value of a metric for one batch, in a form that merges exactly.

    Args:
        keras: ``keras`` or ``tf_keras``.
        metric: The metric. Its state is overwritten.
        given: Arguments of its ``update_state``: target, output, and possibly sample weights.
        update: Its ``update_state``, if that attribute is replaced.
        named: Keyword arguments of its ``update_state``.
    """
    updated = partial(update or metric.update_state, *given, **named)
    owner = next(kind for kind in type(metric).__mro__ if "update_state" in vars(kind))
    if metric not in _checked and not owner.__module__.startswith(f"{keras.__name__}."):
        _check_adds_up(metric, updated)
        _checked.add(metric)
    _begin(metric)
    updated()
    mean = keras.metrics.Mean
    if isinstance(metric, mean) and type(metric).result is mean.result:
        return Sums(ratio, total=float(metric.total.numpy()), weight=float(metric.count.numpy()))
    return KerasMetric(metric, (given, named))


def _begin(metric: Any) -> None:
    for variable in metric.variables:  # reset_state may miss some variables
        variable.assign(tf.zeros_like(variable))
    metric.reset_state()


def _check_adds_up(metric: Any, update: Callable[[], Any]) -> None:
    """Check that the state after two batches is the sum of the states after each."""
    update()  # the first update may create variables
    _begin(metric)
    states = []
    for _ in range(3):
        states.append([np.array(variable.numpy(), np.float64) for variable in metric.variables])
        update()
    adds_up = bool(metric.variables) and all(
        not start.any() and np.allclose(twice, 2 * once, rtol=1e-3, equal_nan=True)
        for start, once, twice in zip(*states, strict=True)
    )
    if not adds_up:
        raise TypeError(
            f"The state of the metric {metric.name!r}, a {type(metric).__name__}, is not a sum "
            "over batches, so that raysgd cannot merge it. Keep the state in variables that add "
            "up, or return a raysgd.metrics.MergeableMetric from validate_batch."
        )


class KerasMetric(MergeableMetric):
    """A Keras metric that is not a mean. Its variables add up, and Keras computes the result.

    Args:
        metric: A metric whose variables are sums over samples, such as AUC.
        given: Arguments of its update: a tuple and a dict.
    """

    def __init__(self, metric: Any, given: Any) -> None:
        self._specs = tf.nest.map_structure(_spec, given)
        self._config = (type(metric), metric.get_config())
        self._sums = [np.array(variable.numpy(), np.float64) for variable in metric.variables]

    def merge(self, other: KerasMetric) -> KerasMetric:
        merged = copy.copy(self)
        pairs = zip(self._sums, other._sums, strict=True)
        merged._sums = [left + right for left, right in pairs]
        return merged

    def compute(self) -> float | dict[str, float]:
        """Return the result of Keras: a number, or one for each class, named ``_0``, ``_1``."""
        kind, config = self._config
        metric = kind.from_config(config)
        if len(metric.variables) != len(self._sums):  # the first batch creates some, as in F1Score
            given, named = tf.nest.map_structure(_zeros, self._specs)
            metric.update_state(*given, **named)
        for variable, value in zip(metric.variables, self._sums, strict=True):
            variable.assign(tf.cast(value, variable.dtype))
        return _by_place(metric.result())


def _by_place(result: Any) -> float | dict[str, float]:
    if isinstance(result, dict):
        return {f"_{name}": float(value) for name, value in result.items()}
    result = np.asarray(result, np.float64)
    if result.ndim == 0:
        return float(result)
    return {f"_{index}": float(value) for index, value in enumerate(result.ravel())}


def _spec(leaf: Any) -> Any:
    return None if leaf is None else tf.TensorSpec(leaf.shape, leaf.dtype)


def _zeros(spec: Any) -> Any:
    return None if spec is None else tf.zeros(spec.shape, spec.dtype)
