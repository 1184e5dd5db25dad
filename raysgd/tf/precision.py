"""Mixed precision through Keras's policies."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from raysgd.tf.keras import kerases

__all__ = ["policy_name", "scaled_optimizer", "set_policy"]


def policy_name(use_fp16: bool | str) -> str | None:
    """Return the policy that the trainer's argument means on this worker; None for none.

    True is float16 on a GPU and bfloat16 on a CPU, where float16 is slow.
    """
    if not use_fp16:
        return None
    if isinstance(use_fp16, str):
        return use_fp16
    return "mixed_float16" if tf.config.list_physical_devices("GPU") else "mixed_bfloat16"


def set_policy(name: str) -> None:
    """Let all models that are made from now on compute in mixed precision."""
    tf.keras.layers  # noqa: B018  imports the Keras that this process chose
    for keras in kerases():
        keras.mixed_precision.set_global_policy(name)


def scaled_optimizer(keras: Any, optimizer: Any, use_fp16: bool | str) -> Any:
    """Return an optimizer that scales the loss, where gradients are float16."""
    scales = keras.mixed_precision.LossScaleOptimizer
    if policy_name(use_fp16) != "mixed_float16" or isinstance(optimizer, scales):
        return optimizer
    return scales(optimizer)
