"""Training steps in graphs: local gradients, their means over the workers, then one update.

A step has two graphs. The first computes a worker's gradients, and the second applies their means.
Between the two graphs, workers communicate outside of any graph, so a step that loses a worker
changes no variable. Each worker traces its own graphs.
"""

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import tensorflow as tf

NEXT_PHASE = (
    "Or create another TFTrainer for the next phase: pass trainer.get_model().get_weights() in its "
    "config, and call model.set_weights(...) in its setup."
)


class StepGraphs:
    """Compiles and runs the steps of one operator, while the flags `trainable` stay the same."""

    def __init__(self, trainable: list[dict[str, bool]] | None = None) -> None:
        self.trainable = trainable
        self._compiled: dict[Any, tuple[Any, Any]] = {}
        """Compiled steps by the IDs of their objects. Holding the objects keeps the IDs valid."""

    def run(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Run a function of tensors in a graph."""
        compiled = self.cache(lambda: tf.function(function, reduce_retracing=True), function)
        return compiled(*arguments)

    def gradients(
        self,
        loss_fn: Callable[..., Any],
        arguments: Sequence[Any],
        optimizer: Any,
        variables: Sequence[Any],
    ) -> tuple[Any, list[Any]]:
        """Return the result of `loss_fn`, and this worker's gradients, scaled for the optimizer.

        A gradient is None if the loss does not depend on the variable.
        """
        compiled = self.cache(
            lambda: _gradients_of(loss_fn, optimizer, variables), loss_fn, optimizer, *variables
        )
        result, gradients = compiled(*arguments)
        return result, gradients

    def apply(self, optimizer: Any, means: Sequence[Any], variables: Sequence[Any]) -> None:
        """Apply gradients that are averaged over the workers."""

        def apply_means(means: Any) -> None:
            optimizer.apply_gradients(zip(means, variables, strict=True))

        self.cache(lambda: tf.function(apply_means), optimizer, *variables)(means)

    def cache(self, make: Callable[[], Any], *objects: Any) -> Any:
        """Return the result of `make`, which is called once for the same objects."""
        # Each lookup of a method makes a new object, which equals the earlier ones.
        key = tuple(each if isinstance(each, MethodType) else id(each) for each in objects)
        if key not in self._compiled:
            self._compiled[key] = make(), objects
        return self._compiled[key][0]


def _gradients_of(loss_fn: Callable[..., Any], optimizer: Any, variables: Sequence[Any]) -> Any:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    known = set(map(id, inner._trainable_variables))  # Keras has no public list
    watched = [variable.value for variable in variables]

    @tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator]
    def compiled(*arguments: Any) -> Any:
        with tf.GradientTape() as tape:
            result = loss_fn(*arguments)
            loss = result[0] if isinstance(result, tuple | list) else result
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, watched)
        if all(each is None for each in gradients):
            raise ValueError(
                "The loss depends on no variable of the model. Compute the loss in TensorFlow from "
                "the model's output."
            )
        for variable, gradient in zip(variables, gradients, strict=True):
            if gradient is not None and id(variable) not in known:
                raise RuntimeError(
                    f"{variable.path} is trainable now, but the optimizer was not built for it. In "
                    "setup, register models and their optimizers in the same order, and call "
                    f"optimizer.build(model.trainable_variables) before you freeze. {NEXT_PHASE}"
                )
        # Gradients of embeddings are sparse.
        return result, [each if each is None else tf.convert_to_tensor(each) for each in gradients]

    return compiled
