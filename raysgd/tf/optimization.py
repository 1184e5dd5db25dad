"""From gradients to updates: means over the workers, and sums over the parts of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from raysgd.data.partition import MicroBatch
from raysgd.loop.feature import StepFeature
from raysgd.tf.features.rollback import Rollback
from raysgd.tf.keras import loss_scale_of, variables_of

if TYPE_CHECKING:
    from raysgd.tf.train_state import KerasTrainState

__all__ = ["Optimization"]


class Optimization(StepFeature):
    """Computes the updates of one operator."""

    def __init__(self, state: KerasTrainState, rollback: Rollback) -> None:
        self._state = state
        self._rollback = rollback
        self._has_stepped = False
        self._held: dict[int, list[Any]] = {}

    def begin_batch(self, place: MicroBatch) -> None:
        if place.position > 0 and not self._held:
            self._state.parts.refuse("train_batch does not call self.minimize()", place)
        self._has_stepped = False

    def update(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
        """Average gradients over the workers and update, or accumulate them until the last part."""
        communication, place = self._state.communication, self._state.step.place
        if self._has_stepped:
            self._state.parts.refuse("train_batch calls self.minimize() several times", place)
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
        if communication.size > 1:
            gradients = communication.completed(gradients, variables)
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        means = communication.mean([gradient for gradient, _ in pairs])
        changed = [variable for _, variable in pairs]
        if len(self._state.optimizers) > 1:  # a later update of the step can fail
            self._rollback.remember([*changed, *variables_of(optimizer), *loss_scale_of(optimizer)])
        self._state.step.begin_update(optimizer)
        self._state.engine.update(optimizer, means, changed)
        self._state.step.end_update(optimizer)

    def commit(self) -> None:
        self._held.clear()
        self._has_stepped = False

    def roll_back(self) -> None:
        self.commit()


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
