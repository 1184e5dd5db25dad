"""Steps under ``tf.function``: own gradients, their means over the workers, then one update.

A step is two graphs. The first computes a worker's gradients, the second applies their means. What
workers tell each other is said in between, outside of both: a step that loses a worker ends there,
with no variable changed. Each worker traces its graphs by itself, as often as its batches differ.
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
        # what a compiled step refers to by its id must live as long as that
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
            What `loss_of` returned, and the gradients, scaled as the optimizer wants it; None for
            a variable that the loss does not depend on.
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
        """Apply gradients, averaged over the workers."""
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
    """Return what is the same for a method each time that it is looked up."""
    return id(getattr(function, "__func__", function)), id(getattr(function, "__self__", None))


def _scaled_loss(optimizer: Any, loss: Any) -> Any:
    if hasattr(optimizer, "get_scaled_loss"):  # tf_keras's LossScaleOptimizer
        return optimizer.get_scaled_loss(loss)
    return optimizer.scale_loss(loss) if hasattr(optimizer, "scale_loss") else loss


def _unscaled(optimizer: Any, gradients: list[Any]) -> list[Any]:
    """Undo the scale for tf_keras; Keras 3's optimizer does it as it applies them."""
    if hasattr(optimizer, "get_unscaled_gradients"):
        unscaled: list[Any] = optimizer.get_unscaled_gradients(gradients)
        return unscaled
    return gradients
