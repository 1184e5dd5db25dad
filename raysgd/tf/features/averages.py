"""Evaluate the averages of optimizers with ``use_ema``, as after ``fit()``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import tensorflow as tf

from raysgd.loop.feature import StepFeature
from raysgd.tf.keras import tf_variable

if TYPE_CHECKING:
    from raysgd.tf.train_state import KerasTrainState

__all__ = ["Averages"]


class Averages(StepFeature):
    """Replaces the weights by the averages that optimizers keep while models are evaluated."""

    def __init__(self, state: KerasTrainState) -> None:
        self._state = state

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        held = []
        for optimizer, variables in self._state.trained():
            inner = getattr(optimizer, "inner_optimizer", optimizer)
            if getattr(inner, "use_ema", False) and int(inner.iterations) > 0:
                held += [(tf_variable(v), tf.identity(tf_variable(v))) for v in variables]
                optimizer.finalize_variable_values(variables)
        try:
            yield
        finally:
            for variable, value in held:
                variable.assign(value)
