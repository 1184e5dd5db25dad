"""The trainer for PyTorch, with the API of current Ray Train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raysgd.train.data_parallel_trainer import DataParallelTrainer
from raysgd.train.torch.config import TorchConfig

__all__ = ["TorchTrainer"]


class TorchTrainer(DataParallelTrainer):
    """Runs a training function for PyTorch on several workers.

    Args:
        train_loop_per_worker: a function of no argument, or of the config.
        torch_config: settings of the process group.
        arguments: further arguments of :class:`raysgd.train.DataParallelTrainer`.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        torch_config: TorchConfig | None = None,
        **arguments: Any,
    ) -> None:
        arguments.setdefault("backend_config", torch_config or TorchConfig())
        super().__init__(train_loop_per_worker, **arguments)
