"""Steps under ``tf.function`` and ``strategy.run``: own gradients, then one update together.

A step is two graphs. The first computes a worker's gradients and may be traced as often as batches
differ, on each worker by itself. The second averages them over the workers and applies them; its
shapes are those of the variables, so that all workers trace it once, and alike: TensorFlow numbers
collectives as it traces them, and workers whose numbers differ wait for each other for good. No
variable changes before all means are there, so that a step that loses a worker leaves none changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from raysgd.tf.communication import Communication
from raysgd.tf.keras import tf_variable

__all__ = ["Engine"]


class Engine:
    """Compiles and runs the steps of one operator."""

    def __init__(self, communication: Communication) -> None:
        self._communication = communication
        self._gradients: dict[Any, Any] = {}
        self._updates: dict[Any, Any] = {}
        self._calls: dict[Any, Any] = {}
        # what a compiled step refers to by its id must live as long as that
        self._kept: list[Any] = []

    @property
    def strategy(self) -> Any:
        """The strategy that everything runs under."""
        return self._communication.strategy

    def call(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Run a function of tensors in a graph, in a replica's context."""
        key = _key(function)
        if key not in self._calls:
            self._kept.append(function)
            strategy = self.strategy

            @tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator]
            def compiled(*given: Any) -> Any:
                return strategy.run(function, args=given)

            self._calls[key] = compiled
        return self._calls[key](*arguments)

    def gradients(
        self,
        loss_of: Callable[..., Any],
        arguments: Sequence[Any],
        optimizer: Any,
        variables: Sequence[Any],
    ) -> tuple[Any, list[Any], list[int]]:
        """Compute a loss and this worker's gradients of it.

        Returns:
            What `loss_of` returned; the gradients, scaled as the optimizer wants it; and of which
            of the variables they are.
        """
        key = (_key(loss_of), id(optimizer), tuple(id(v) for v in variables))
        if key not in self._gradients:
            self._kept += [loss_of, optimizer, list(variables)]
            self._gradients[key] = self._compiled_gradients(loss_of, optimizer, variables)
        compiled, indices = self._gradients[key]
        result, gradients = compiled(*arguments)
        return result, gradients, indices

    def _compiled_gradients(
        self, loss_of: Callable[..., Any], optimizer: Any, variables: Sequence[Any]
    ) -> tuple[Any, list[int]]:
        strategy, indices = self.strategy, list[int]()
        watched = [tf_variable(variable) for variable in variables]

        def in_replica(*given: Any) -> Any:
            with tf.GradientTape() as tape:
                result = loss_of(*given)
                loss = result[0] if isinstance(result, tuple | list) else result
                scaled = _scaled_loss(optimizer, loss)
            found = tape.gradient(scaled, watched)
            indices[:] = [index for index, each in enumerate(found) if each is not None]
            if not indices:
                raise ValueError(
                    "The loss depends on no variable of the model: compute it in TensorFlow, "
                    "from the model's output."
                )
            return result, [found[index] for index in indices]

        @tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator]
        def compiled(*given: Any) -> Any:
            return strategy.run(in_replica, args=given)

        return compiled, indices

    def update(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Average gradients over the workers and apply them, on all workers or on none."""
        # the compiled update applies to these variables, whatever gradients it is given
        key = (id(optimizer), tuple(id(variable) for variable in variables))
        if key not in self._updates:
            self._kept += [optimizer, list(variables)]
            _leave_averaging_to_us(optimizer)
            self._updates[key] = self._compiled_update(optimizer, list(variables))
        self._updates[key](list(gradients))

    def _compiled_update(self, optimizer: Any, variables: list[Any]) -> Any:
        communication = self._communication
        aggregates = not hasattr(optimizer, "_all_reduce_sum_gradients")

        def in_replica(gradients: Any) -> None:
            means = communication.mean(gradients)
            leaves = [t for m in means for t in tf.nest.flatten(m, expand_composites=True)]
            with tf.control_dependencies(leaves):
                means = [tf.identity(mean) for mean in means]
            means = _unscaled(optimizer, means)
            pairs = zip(means, variables, strict=True)
            if aggregates and communication.size > 1:
                optimizer.apply_gradients(pairs, skip_gradients_aggregation=True)
            else:
                optimizer.apply_gradients(pairs)

        strategy = self.strategy

        @tf.function  # type: ignore[untyped-decorator]
        def compiled(gradients: Any) -> None:
            strategy.run(in_replica, args=(gradients,))

        return compiled


def _key(function: Callable[..., Any]) -> tuple[int, int]:
    """Return what is the same for a method each time that it is looked up."""
    return id(getattr(function, "__func__", function)), id(getattr(function, "__self__", None))


def _leave_averaging_to_us(optimizer: Any) -> None:
    """Keep Keras 3's optimizers from adding up gradients that are averaged already.

    tf_keras's have an argument for it.
    """
    for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if each is not None and hasattr(each, "_all_reduce_sum_gradients"):
            each._all_reduce_sum_gradients = list


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
