"""The interface of precisions, and full precision."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from raysgd.loop.feature import UpdateFeature
from raysgd.torch.tensors import parameters_of

_OFF = contextlib.nullcontext()


class Precision(UpdateFeature):
    """Computes in full precision. Subclasses override what they change.

    A step calls `autocast` around the forward pass and the loss, then `backward` for each loss. For
    each optimizer it calls `unscale`, if something inspects the gradients, and `step`. Finally it
    calls `commit`, or `roll_back` if the step failed.

    Args:
        device: device of the models.
        dtype: the trainer's ``amp_dtype``.
    """

    name: ClassVar[str] = "full precision (use_fp16=False)"
    """Name in error messages."""
    takes_dtype: ClassVar[bool] = False
    """Whether users choose the dtype, with ``amp_dtype``."""
    scales_loss: bool = False
    """Whether the loss is scaled, so that a step can overflow and be skipped."""

    def __init__(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self.device = device
        self.dtype = dtype
        """dtype of forward passes. None for that of the parameters."""
        self._optimizers: list[torch.optim.Optimizer] = []

    def prepare(
        self,
        models: list[torch.nn.Module],
        optimizers: list[torch.optim.Optimizer],
        arguments: Mapping[str, Any] | None,
    ) -> list[torch.nn.Module]:
        """Return the models to wrap and use. The optimizers must stay the same objects."""
        self._optimizers = optimizers
        return models

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for forward passes in this precision."""
        return _OFF

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """Add the gradients of `loss`. An update may follow if it `is_last`."""
        loss.backward()

    def scaler_tensors(self) -> Any:
        """Return what the workers must have in common, with tensors on their device."""
        return ()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients, for clipping, unless this has happened since the last `step`."""

    def parameters(self, optimizer: torch.optim.Optimizer) -> Sequence[torch.Tensor]:
        return parameters_of(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the parameters, unless gradients have overflowed."""
        optimizer.step()


def to_full_precision(value: Any) -> Any:
    """Convert a tensor of 16-bit floats to float32. Return other values unchanged."""
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_half else value
