"""Operators without a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from raysgd.torch import TrainingOperator

__all__ = ["run_operator"]


def run_operator(
    operator_cls: type[TrainingOperator],
    config: Mapping[str, Any] | None = None,
    *,
    scheduler_step_freq: str | None = None,
    use_fp16: bool | str = False,
    amp_dtype: torch.dtype | None = None,
) -> TrainingOperator:
    """Create an operator in this process, on CPU, and run its ``setup``; no Ray, no process group.

    Its methods can then be called and debugged like those of any object::

        operator = run_operator(Classifier, {"lr": 0.1})
        batch = next(iter(operator.train_loader))
        print(operator.train_batch(batch, {"batch_idx": 0}))
        print(operator.validate(iter(operator.validation_loader)))

    Args:
        operator_cls: the class.
        config: handed to the operator.
        scheduler_step_freq: as for the trainer; needed where setup registers schedulers.
        use_fp16: as for the trainer.
        amp_dtype: as for the trainer.

    Outside of ``trainer.train()`` each batch is an accumulation group of its own.
    """
    from raysgd.torch.components import OperatorSettings
    from raysgd.torch.runner import build_operator

    settings = OperatorSettings(
        scheduler_step_freq=scheduler_step_freq, use_fp16=use_fp16, amp_dtype=amp_dtype
    )
    return build_operator(operator_cls, dict(config or {}), settings)
