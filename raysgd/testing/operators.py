"""Operators without a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from raysgd._internal.imports import load_triton_first

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
    from raysgd._internal.runner import WorkerContext
    from raysgd.tf.operator import TrainingOperator as KerasOperator

    arguments: Any = {"training_operator_cls": operator_cls, "config": config, "use_fp16": use_fp16}
    if isinstance(operator_cls, type) and issubclass(operator_cls, KerasOperator):
        from raysgd.tf.options import KerasOptions
        from raysgd.tf.runner import KerasRunner

        load_triton_first()
        runner: Any = KerasRunner(KerasOptions(**arguments))
    else:
        from raysgd.torch.options import TorchOptions
        from raysgd.torch.runner import TorchRunner

        arguments |= {"scheduler_step_freq": scheduler_step_freq, "amp_dtype": amp_dtype}
        runner = TorchRunner(TorchOptions(**arguments))
    context = WorkerContext(is_in_driver=True)
    runner.prepare(context)
    runner.setup(context)
    return runner.operator
