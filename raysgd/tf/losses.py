"""Losses and metrics of both Kerases, as plain means over a worker's own batch."""

from __future__ import annotations

import contextlib
import inspect
import logging
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
]

logger = logging.getLogger(__name__)


def loss_function(
    keras: Any,
    criterion: Any,
    model: Any = None,
    loss_weights: Any = None,
    as_compiled: bool = False,
) -> MeanLoss:
    """Return a function of (target, output) that gives the mean loss of a batch.

    Args:
        keras: ``keras`` or ``tf_keras``.
        criterion: a loss in any form that ``compile()`` takes, or any function of
            (target, output).
        model: the model that it is for, which names the outputs.
        loss_weights: as ``compile()`` takes them.
        as_compiled: whether Keras calls the loss, also if it is a function.
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
        # Keras's own function, or its name: as compile() takes it, with masks and alike ranks
        wrapper = keras.losses.MeanSquaredError.__base__
        criterion = wrapper(criterion, name=criterion.__name__)
    compiled = _compiled(keras, model, loss=criterion, loss_weights=loss_weights)
    if as_compiled or criterion in _BY_SHAPE:
        return MeanLoss(criterion, compiled, "always")
    is_keras = isinstance(criterion, keras.losses.Loss)
    return MeanLoss(criterion, compiled, "several outputs" if is_keras else "weights")


_BY_SHAPE = ("crossentropy", "ce")
"""Names of losses that Keras chooses by the shapes of target and output."""


def _compiled(keras: Any, model: Any, **arguments: Any) -> Any:
    """Return a model without layers, which is compiled: it computes losses and metrics as fit()."""
    shell = keras.Model(name="compiled")
    names = getattr(model, "output_names", None)
    if names:
        shell.output_names = list(names)
    shell.compile("sgd", **arguments)
    return shell


class MeanLoss:
    """A loss as one number, a worker's mean over its batch; what is read of it is the loss's own.

    Args:
        criterion: what the user gave.
        compiled: a compiled model whose ``compute_loss`` computes it as ``fit()`` does.
        uses_compiled: when that is called, and not `criterion`: "always", for "several outputs", or
            if there are "weights" alone.
    """

    def __init__(self, criterion: Any, compiled: Any, uses_compiled: str) -> None:
        self._criterion, self._compiled = criterion, compiled
        self._uses_compiled = uses_compiled

    def __call__(self, target: Any, output: Any, *others: Any, **named: Any) -> Any:
        """Return the mean loss; what else is given, such as sample weights, goes to the loss."""
        output = widened(output)
        several = self._uses_compiled == "several outputs" and tf.nest.is_nested(output)
        if several or self._uses_compiled == "always":
            return self._as_fit(target, output, *others, **named)
        values = self._criterion(target, output, *others, **named)
        return tf.reduce_mean(tf.cast(values, tf.float32))

    def weighted(self, target: Any, output: Any, sample_weight: Any) -> Any:
        """Return the mean loss of a batch whose samples may have weights."""
        if sample_weight is None:
            return self(target, output)
        return self._as_fit(target, widened(output), sample_weight)

    def _as_fit(self, target: Any, output: Any, sample_weight: Any = None) -> Any:
        values = self._compiled.compute_loss(None, target, output, sample_weight)
        return tf.reduce_mean(tf.cast(values, tf.float32))

    def parts(self) -> dict[str, float]:
        """Return the losses of the outputs, by name, that were computed since the last call."""
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
    """Return an output with float32 in place of float16 and bfloat16, in which losses overflow."""
    return tf.nest.map_structure(_widened, output)


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
    """Metrics in every form that ``compile()`` takes, as Keras names them, batch by batch.

    Args:
        keras: ``keras`` or ``tf_keras``.
        model: the model that they are for.
        given: the metrics; None for those that the model was compiled with.
    """

    def __init__(self, keras: Any, model: Any, given: Any = None) -> None:
        for each in tf.nest.flatten(given) if given is not None else []:
            if each is not None and not isinstance(each, str) and not callable(each):
                raise TypeError(
                    f"register(metrics=...) must be metrics of Keras, but got {each!r}."
                )
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
        """Return what the metrics say about one batch, by name."""
        if self._is_empty:
            return {}
        given = [_tensors(each) for each in (target, output, sample_weight)]
        if not self._names:
            self._held.update_state(*given)  # it makes its metrics of a first batch
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
    """Return names without the numbers by which Keras counts the objects of a process: auc_7."""
    stable: list[str] = []
    for name, metric in zip(names, metrics, strict=True):
        kind = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(metric).__name__).lower()
        name = re.sub(rf"((?:^|_){kind})_\d+$", r"\1", name)
        numbered = (f"{name}_{number}" for number in range(1, len(stable) + 1))
        stable.append(next(n for n in (name, *numbered) if n not in stable))
    return stable


_adding_up = weakref.WeakKeyDictionary[Any, bool]()
"""Of own metrics, whether the state after two batches is the sum of the states after each."""


def batch_metric(
    keras: Any, metric: Any, *given: Any, update: Any = None, **named: Any
) -> MergeableMetric:
    """Return what a metric says about one batch, so that it can be merged exactly.

    Args:
        keras: ``keras`` or ``tf_keras``.
        metric: the metric; its state is lost.
        given: arguments of its ``update_state``: target and output, perhaps sample weights.
        update: its ``update_state``, if that is not the attribute of this name.
        named: further arguments.
    """
    update = update or metric.update_state
    _begin(metric)
    update(*given, **named)
    owner = next(kind for kind in type(metric).__mro__ if "update_state" in vars(kind))
    is_own = not owner.__module__.startswith(f"{keras.__name__}.")
    if is_new := is_own and metric not in _adding_up:
        _adding_up[metric] = _adds_up(metric, partial(update, *given, **named))
    adds_up = not is_own or _adding_up[metric]
    mean = keras.metrics.Mean
    is_mean = isinstance(metric, mean) and type(metric).result is mean.result  # no root of one
    if is_mean and adds_up:
        return Sums(ratio, total=float(metric.total.numpy()), weight=float(metric.count.numpy()))
    found = KerasMetric(keras.__name__, metric, (given, named), adds_up)
    if is_new:
        _check_remade(metric, found)
    return found


def _begin(metric: Any) -> None:
    for variable in metric.variables:  # some forget a part in reset_state
        variable.assign(tf.zeros_like(variable))
    metric.reset_state()


def _adds_up(metric: Any, update: Callable[[], Any]) -> bool:
    states = []
    _begin(metric)
    for _ in range(3):
        states.append([np.array(variable.numpy(), np.float64) for variable in metric.variables])
        update()
    _begin(metric)
    update()
    adds_up = bool(metric.variables) and all(
        not start.any() and np.allclose(twice, 2 * once, rtol=1e-3, equal_nan=True)
        for start, once, twice in zip(*states, strict=True)
    )
    if not adds_up:
        logger.warning(
            "The state of the metric %r, a %s, is no sum over batches. To merge it, targets and "
            "outputs of the whole epoch are kept in memory and sent to the driver.",
            metric.name,
            type(metric).__name__,
        )
    return adds_up


def _check_remade(metric: Any, found: KerasMetric) -> None:
    expected, remade = _numbers(metric.result()), None
    with contextlib.suppress(Exception):
        remade = _numbers(found.compute())
    if remade is None or not np.allclose(expected, remade, rtol=1e-3, equal_nan=True):
        raise TypeError(
            f"The metric {metric.name!r}, a {type(metric).__name__}, cannot be made again from its "
            f"get_config(): that one gives {remade}, and not {expected}. Let get_config() return "
            "all arguments of __init__, and keep no state but variables that add_weight() makes."
        )


def _numbers(result: Any) -> list[float]:
    """Return what a metric has computed as a list: a number, an array, or a dict of numbers."""
    values = result.values() if isinstance(result, dict) else [result]
    return [float(number) for value in values for number in np.ravel(np.asarray(value))]


class KerasMetric(MergeableMetric):
    """A metric of Keras that is no mean: counts that add up, and what Keras makes of them.

    Args:
        flavor: "keras" or "tf_keras".
        metric: a metric whose variables are sums over samples, as those of AUC and Precision are.
        given: what it was updated with: a tuple of arguments, and a dict of named ones.
        adds_up: whether they are such sums. Otherwise what was given is kept, to be given again.
    """

    def __init__(self, flavor: str, metric: Any, given: Any, adds_up: bool = True) -> None:
        self._flavor, self._adds_up = flavor, adds_up
        self._given = [tf.nest.map_structure(_spec if adds_up else _array, given)]
        self._config = (type(metric), metric.get_config())
        self._sums = [np.array(variable.numpy(), np.float64) for variable in metric.variables]

    def merge(self, other: KerasMetric) -> KerasMetric:
        """Add the counts."""
        merged = KerasMetric.__new__(KerasMetric)
        merged._flavor, merged._adds_up, merged._sums = self._flavor, self._adds_up, []
        merged._config, merged._given = self._config, self._given
        if not self._adds_up:
            merged._given = self._given + other._given
            return merged
        pairs = zip(self._sums, other._sums, strict=True)
        merged._sums = [left + right for left, right in pairs]
        return merged

    def compute(self) -> float | dict[str, float]:
        """Let Keras compute it: a number, or one for each class by its place, ``_0``, ``_1``."""
        kind, config = self._config
        metric = kind.from_config(config)
        if not self._adds_up:
            for given, named in self._given:
                metric.update_state(*given, **named)
            return _by_place(metric.result())
        if len(metric.variables) != len(self._sums):  # F1Score and others make them of a batch
            given, named = tf.nest.map_structure(_zeros, self._given[0])
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


def _array(leaf: Any) -> Any:
    return None if leaf is None else np.asarray(leaf)


def _spec(leaf: Any) -> Any:
    return None if leaf is None else tf.TensorSpec(leaf.shape, leaf.dtype)


def _zeros(spec: Any) -> Any:
    return None if spec is None else tf.zeros(spec.shape, spec.dtype)
