"""What an operator offers to the methods that users write."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from raysgd.loop.operator_base import OperatorBase
from raysgd.torch.registration import OperatorSettings, TorchRegistration
from raysgd.torch.to_device import moved

__all__ = ["OperatorTools"]


class OperatorTools(OperatorBase):
    """The helpers and properties of :class:`raysgd.TrainingOperator`."""

    def __init__(self, config: Mapping[str, Any], settings: OperatorSettings | None = None) -> None:
        super().__init__(config)
        self._registration: TorchRegistration = TorchRegistration(settings or OperatorSettings())

    # ---- what loops of your own use

    def train_mode(self, training: bool) -> None:
        """Put every registered model into train or eval mode."""
        for model in self._registration.models:
            model.train(training)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for forward pass and loss, in which they run in mixed precision.

        It does nothing where the trainer has ``use_fp16=False``. Leave it before `backward`.
        """
        return self._registration.optimization.precision.autocast()

    def backward(self, loss: torch.Tensor, num_samples: float | None = None) -> None:
        """Compute the gradients of `loss`, scaled and weighted as precision and accumulation ask.

        Several losses of one batch may be given one after the other; their gradients add up.

        Args:
            loss: a tensor of one element, the mean over the samples of the batch.
            num_samples: how many these are, by which the batches of an accumulation group are
                weighted; None gives them all the same weight.

        Raises:
            TypeError: if `num_samples` is not a number.
            ValueError: if it is not above 0, or does not fit what was given for another loss.
            RuntimeError: if gradients of earlier batches of the group were zeroed.
        """
        self._registration.optimization.backward(loss, num_samples)

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update with the gradients that `backward` computed, and zero them.

        They are unscaled, clipped if ``max_grad_norm`` was registered, and used; an overflow of
        float16 makes all workers skip the update alike. With gradient accumulation it does
        nothing until the last batch of a group. Call it for every batch, without ``zero_grad``.

        Args:
            optimizer: a registered optimizer.

        Raises:
            TypeError: if the optimizer needs a closure.
            RuntimeError: if, with gradient accumulation, it is stepped twice in a batch, or the
                last batch of a group had no `backward`.
        """
        self._registration.optimization.step(optimizer)

    def step_schedulers(self) -> None:
        """Step every registered scheduler."""
        with self._registration.optimization.tolerating_a_skipped_step():
            for scheduler in self._registration.schedulers:
                scheduler.step()

    def to_device(self, batch: Any) -> Any:
        """Return `batch` with its tensors, also nested ones, on this worker's device.

        Objects that are no containers, and have a method ``to(device)``, are asked for themselves.
        """
        return moved(batch, self.device) if self.device.type != "cpu" else batch

    # ---- what users read

    @property
    def device(self) -> torch.device:
        """This worker's device."""
        return self._registration.settings.device

    @property
    def device_ids(self) -> list[int] | None:
        """Index of this worker's GPU, in a list, as DistributedDataParallel takes it."""
        return None if self.device.index is None else [self.device.index]

    @property
    def use_gpu(self) -> bool:
        """Whether this worker has a GPU."""
        return self.device.type == "cuda"

    @property
    def use_fp16(self) -> bool:
        """Whether training runs in mixed precision."""
        return self._registration.settings.options.use_fp16 is not False

    @property
    def use_fp16_native(self) -> bool:
        """Whether mixed precision is that of ``torch.amp``."""
        return self._registration.settings.options.use_fp16 is True

    @property
    def use_fp16_apex(self) -> bool:
        """Whether mixed precision is that of NVIDIA Apex."""
        return self._registration.settings.options.use_fp16 == "apex"

    @property
    def scheduler_step_freq(self) -> str | None:
        """When schedulers step: "batch", "epoch", "manual", or None."""
        return self._registration.settings.options.scheduler_step_freq
