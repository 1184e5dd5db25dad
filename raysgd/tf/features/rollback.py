"""Restore variables if a step with several optimizers is discarded."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from raysgd.loop.feature import StepFeature
from raysgd.loop.step import Step
from raysgd.tf.keras import tf_variable

__all__ = ["Rollback"]


class Rollback(StepFeature):
    """Copies what an update changes, because a later optimizer of the step may fail."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._before: dict[int, tuple[Any, Any]] = {}

    def remember(self, variables: list[Any]) -> None:
        """Copy variables, unless the step has copied them already."""
        for variable in map(tf_variable, variables):
            if id(variable) not in self._before:
                self._before[id(variable)] = variable, tf.identity(variable)

    def commit(self) -> None:
        self._before.clear()

    def roll_back(self) -> None:
        for variable, value in self._before.values():
            variable.assign(value)
        if self._step.updating is not None and not self._before:
            self._step.is_partial = True
        self._before.clear()
