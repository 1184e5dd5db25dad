"""Training steps in graphs: local gradients, their means over the workers, then one update.

A step has two graphs. The first computes a worker's gradients, and the second applies their means.
Workers communicate between them, outside of any graph, so a step that loses a worker changes no
variable. Each worker traces its own graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from raysgd.tf.keras import tf_variable

__all__ = ["Engine"]


class Engine:
    """Compiles and runs the steps of one operator."""

    def __init__(self) -> None:
        self._gradients: dict[Any, Any] = {}
        self._updates: dict[Any, Any] = {}
        self._calls: dict[Any, Any] = {}
        # The keys of compiled steps are IDs of these objects, so keep the objects alive.
        self._kept: list[Any] = []

    def call(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Run a function of tensors in a graph."""
        key = _key(function)
        if key not in self._calls:
            self._kept.append(function)
            self._calls[key] = tf.function(function, reduce_retracing=True)
        return self._calls[key](*arguments)

    def gradients(
        self,
        loss_of: Callable[..., Any],
        arguments: Sequence[Any],
        optimizer: Any,
        variables: Sequence[Any],
    ) -> tuple[Any, list[Any]]:
        """Compute a loss and this worker's gradients of it.

        Returns:
            The result of `loss_of`, and the gradients, scaled for the optimizer. A gradient is None
            if the loss does not depend on the variable.
        """
        key = (_key(loss_of), id(optimizer), tuple(id(v) for v in variables))
        if key not in self._gradients:
            self._kept += [loss_of, optimizer, list(variables)]
            self._gradients[key] = self._compiled_gradients(loss_of, optimizer, variables)
        result, gradients = self._gradients[key](*arguments)
        return result, gradients

    def _compiled_gradients(
        self, loss_of: Callable[..., Any], optimizer: Any, variables: Sequence[Any]
    ) -> Any:
        watched = [tf_variable(variable) for variable in variables]

        @tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator]
        def compiled(*given: Any) -> Any:
            with tf.GradientTape() as tape:
                result = loss_of(*given)
                loss = result[0] if isinstance(result, tuple | list) else result
                scaled = _scaled_loss(optimizer, loss)
            found = tape.gradient(scaled, watched)
            if all(each is None for each in found):
                raise ValueError(
                    "The loss depends on no variable of the model: compute it in TensorFlow, "
                    "from the model's output."
                )
            return result, found

        return compiled

    def update(self, optimizer: Any, means: Sequence[Any], variables: Sequence[Any]) -> None:
        """Apply gradients that are averaged over the workers."""
        key = (id(optimizer), tuple(id(variable) for variable in variables))
        if key not in self._updates:
            self._kept += [optimizer, list(variables)]
            self._updates[key] = self._compiled_update(optimizer, list(variables))
        self._updates[key](means)

    def _compiled_update(self, optimizer: Any, variables: list[Any]) -> Any:
        @tf.function  # type: ignore[untyped-decorator]
        def compiled(means: Any) -> None:
            optimizer.apply_gradients(zip(_unscaled(optimizer, means), variables, strict=True))

        return compiled


def _key(function: Callable[..., Any]) -> tuple[int, int]:
    """Return a key for a method that is the same each time code looks up the method."""
    return id(getattr(function, "__func__", function)), id(getattr(function, "__self__", None))


def _scaled_loss(optimizer: Any, loss: Any) -> Any:
    if hasattr(optimizer, "get_scaled_loss"):  # the LossScaleOptimizer of tf_keras
        return optimizer.get_scaled_loss(loss)
    return optimizer.scale_loss(loss) if hasattr(optimizer, "scale_loss") else loss


def _unscaled(optimizer: Any, gradients: list[Any]) -> list[Any]:
    """Unscale gradients for tf_keras. The optimizer of Keras 3 does so itself."""
    if hasattr(optimizer, "get_unscaled_gradients"):
        unscaled: list[Any] = optimizer.get_unscaled_gradients(gradients)
        return unscaled
    return gradients
