"""The device and the precision of an operator, as properties."""

from __future__ import annotations

import torch

from raysgd.loop.operator_base import OperatorBase
from raysgd.torch.train_state import TorchTrainState


class TorchOperatorBase(OperatorBase):
    """The properties that PyTorch operators offer to users."""

    _train_state: TorchTrainState

    @property
    def device(self) -> torch.device:
        """This worker's device."""
        return self._train_state.settings.device

    @property
    def device_ids(self) -> list[int] | None:
        """List with the index of this worker's GPU, or None without a GPU."""
        return None if self.device.index is None else [self.device.index]

    @property
    def use_gpu(self) -> bool:
        """Whether this worker has a GPU."""
        return self.device.type == "cuda"

    @property
    def use_fp16_native(self) -> bool:
        """Whether ``torch.amp`` provides mixed precision."""
        return self._train_state.settings.options.use_fp16 is True

    @property
    def use_fp16_apex(self) -> bool:
        """Whether NVIDIA Apex provides mixed precision."""
        return self._train_state.settings.options.use_fp16 == "apex"

    @property
    def scheduler_step_freq(self) -> str | None:
        """When schedulers step: "batch", "epoch", "manual", or None."""
        return self._train_state.settings.options.scheduler_step_freq
