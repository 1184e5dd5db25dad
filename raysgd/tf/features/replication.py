"""Keep Keras models equal on all workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from raysgd.loop.feature import StepFeature
from raysgd.tf.communication import communication_of
from raysgd.tf.keras import tf_variable

if TYPE_CHECKING:
    from raysgd.tf.train_state import KerasTrainState

__all__ = ["Replication"]


class Replication(StepFeature):
    """Copies the state at the start, and averages statistics after each call."""

    replicates = True

    def __init__(self, state: KerasTrainState) -> None:
        self._state = state

    def start_together(self) -> None:
        self._state.share_training_state(0, follows=True)

    def enter(self) -> None:
        context, options = self._state.context, self._state.settings.options
        self._state.communication = communication_of(context, options.use_horovod)

    def sync_buffers(self) -> None:
        """Average non-trainable variables, such as batch statistics, over the ranks."""
        communication = self._state.communication
        if communication.size == 1:
            return
        held = [
            tf_variable(v) for model in self._state.models for v in model.non_trainable_variables
        ]
        floats = [variable for variable in held if variable.dtype.is_floating]
        if floats:
            means = communication.mean([tf.identity(variable) for variable in floats])
            for variable, mean in zip(floats, means, strict=True):
                variable.assign(mean)
