"""What a LightningModule finds in ``self.trainer``, and what it logs."""

import contextlib
import numbers
from collections.abc import Mapping
from typing import Any

import torch

from raysgd._internal.forwarding import forward_to
from raysgd.metrics import Sums, ratio
from raysgd.torch.interop.torchmetrics import (
    REDUCTIONS,
    MergeableTorchMetric,
    ReducedMetric,
    copy_without_sync,
)


class TrainerStandIn:
    """Replaces ``self.trainer`` of a module."""

    sanity_checking = False  # fit() restores everything after its sanity check
    progress_bar_callback = None
    logger = None
    loggers: tuple[Any, ...] = ()

    def __init__(self, operator: Any) -> None:
        self._operator = operator
        if "max_epochs" in operator.config:
            self.max_epochs = int(operator.config["max_epochs"])
        self._logged: dict[str, Any] = {}
        self._metrics: dict[str, Any] = {}  # of torchmetrics, whose states are in `_logged`
        self.batch_size: int | None = None
        """The first ``batch_size`` that the current batch has logged."""
        self.datamodule: Any = None
        self.lr_scheduler_configs: list[Any] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.strategy, self._lightning_optimizers = self, self.optimizers  # for self.optimizers()

    def __getattr__(self, name: str) -> Any:
        reason = (
            'pass config={"max_epochs": ...}.'
            if name in ("max_epochs", "estimated_stepping_batches")
            else "raysgd trains this module without Lightning's Trainer, and has no such "
            "attribute. Pass the value in the config, or override a method of the operator."
        )
        raise AttributeError(f"self.trainer.{name}: {reason}")

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return the tensors of all workers, stacked by rank."""
        from torch.distributed.nn.functional import all_gather

        if self.world_size == 1:
            return torch.as_tensor(tensor)
        stacked = torch.stack(all_gather(torch.as_tensor(tensor).contiguous(), group))
        return stacked if sync_grads else stacked.detach()

    model: torch.nn.Module = forward_to("_operator.module")
    num_training_batches: int = forward_to("_operator.steps_per_epoch")
    estimated_stepping_batches = property(lambda self: self.max_epochs * self.num_training_batches)
    should_stop = property(lambda self: False)  # an assignment raises an error
    global_rank: int = forward_to("_operator.world_rank")
    local_rank: int = forward_to("_operator.local_rank")
    world_size: int = forward_to("_operator.world_size")
    num_devices: int = forward_to("_operator.world_size")
    is_global_zero = property(lambda self: self.global_rank == 0)

    global_step: int = forward_to("_operator._num_stepped")
    current_epoch: int = forward_to("_operator._running_epoch")

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        batch_size: int | None = None,
        **_: Any,
    ) -> None:
        """Collect a value for the metrics of the batch, with the arguments of ``self.log``."""
        if self.batch_size is None:
            self.batch_size = batch_size
        if hasattr(value, "metric_state"):
            self._metrics[name] = value
            self._logged[name] = MergeableTorchMetric(copy_without_sync(value))
            value.reset()
            return
        is_tensor = isinstance(value, torch.Tensor) and value.numel() == 1
        if not is_tensor and not isinstance(value, numbers.Number):
            raise TypeError(
                f"self.log({name!r}, {value!r}): must be a number, a tensor of one element, or a "
                "metric of torchmetrics."
            )
        reduction = str(getattr(reduce_fx, "__name__", reduce_fx)).lower()
        if reduction not in (*REDUCTIONS, "mean", "avg"):
            raise ValueError(
                f'self.log(reduce_fx={reduce_fx!r}): must be "mean", "sum", "min", or "max". For '
                "others, return a raysgd.metrics.MergeableMetric from train_batch of the operator."
            )
        value = value.detach() if is_tensor else value
        if reduction in REDUCTIONS:
            value = ReducedMetric(reduction, value)
        elif batch_size is not None:
            value = Sums(ratio, total=value * batch_size, weight=batch_size)
        self._logged[name] = value

    def log_dict(self, dictionary: Mapping[str, Any], *arguments: Any, **keywords: Any) -> None:
        for name, value in dictionary.items():
            self.log(name, value, *arguments, **keywords)

    def restoring_metrics(self, result: Mapping[str, Any]) -> contextlib.ExitStack:
        """Give metrics that batches have logged the states of all batches within the context."""
        stack = contextlib.ExitStack()
        for key, value in result.items():
            metric = self._metrics.get(key.removesuffix(getattr(value, "suffix", "")))
            if metric is not None and isinstance(value.metric, MergeableTorchMetric):
                value.metric.load_into(metric)
                stack.callback(metric.reset)
        return stack

    def pop_logged(self) -> dict[str, Any]:
        logged, self._logged, self.batch_size = self._logged, {}, None
        return logged
