"""Operators without a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def run_operator(
    operator_cls: type[Any],
    config: Mapping[str, Any] | None = None,
    *,
    scheduler_step_freq: str | None = None,
    use_fp16: bool | str = False,
    amp_dtype: torch.dtype | None = None,
) -> Any:
    """Create an operator in this process, on the CPU, and run its ``setup``.

    This needs no Ray and no process group. You can call and debug its methods like those of any
    object::

        operator = run_operator(Classifier, {"lr": 0.1})
        batch = next(iter(operator.train_loader))
        print(operator.train_batch(batch, {"batch_idx": 0}))
        print(operator.validate(iter(operator.validation_loader)))

    Each batch is its own accumulation group, unlike in ``trainer.train()``.

    The arguments are the same as those of the trainer. `scheduler_step_freq` is required if
    ``setup`` registers schedulers.
    """
    from raysgd.tf.operator import TrainingOperator as KerasOperator

    if isinstance(operator_cls, type) and issubclass(operator_cls, KerasOperator):
        return _keras_operator(operator_cls, dict(config or {}), use_fp16)
    from raysgd.torch.options import TorchOptions
    from raysgd.torch.registered_state import OperatorSettings
    from raysgd.torch.runner import build_operator

    options = TorchOptions(
        scheduler_step_freq=scheduler_step_freq, use_fp16=use_fp16, amp_dtype=amp_dtype
    )
    operator = build_operator(operator_cls, dict(config or {}), OperatorSettings(options=options))
    operator.on_world_change()
    return operator


def _keras_operator(operator_cls: Any, config: dict[str, Any], use_fp16: bool | str) -> Any:
    from raysgd._internal.imports import load_triton_first
    from raysgd.comm.tensorflow import check_tensorflow

    check_tensorflow("run_operator")
    load_triton_first()
    from raysgd._internal.context import WorkerContext
    from raysgd.tf.communication import Communication
    from raysgd.tf.options import TFOptions, TFSettings
    from raysgd.tf.runner import build_operator

    options = TFOptions(use_fp16=use_fp16)
    settings = TFSettings(options=options, context=WorkerContext(in_driver=True))
    operator = build_operator(operator_cls, config, settings, Communication(), seed=0)
    operator.on_world_change()
    return operator
