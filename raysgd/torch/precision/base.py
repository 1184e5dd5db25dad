"""The interface of precisions, and full precision."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from raysgd.errors import CheckpointError
from raysgd.loop.feature import StepFeature

__all__ = ["Precision"]


class Precision(StepFeature):
    """Controls the number format of a step, and its effects on the update.

    This class computes in full precision. Subclasses override what they change.

    A step calls `autocast` around the forward pass and the loss, then `backward` (once or more
    often). For each optimizer it calls `unscale`, if gradients are inspected, and `step`. Finally
    it calls `commit`, or `roll_back` if the step failed.

    Args:
        device: device of the models.
        dtype: the trainer's ``amp_dtype``.
    """

    state_key: ClassVar[str | None] = None
    """Key of this precision's state in a saved state."""
    name: ClassVar[str] = "full precision (use_fp16=False)"
    """Name in error messages."""
    scales: bool = False
    """Whether the loss is scaled, so that a step can overflow and be skipped."""

    def __init__(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self.device = device

    def prepare(
        self,
        models: list[torch.nn.Module],
        optimizers: list[torch.optim.Optimizer],
        arguments: Mapping[str, Any] | None,
    ) -> list[torch.nn.Module]:
        """Prepare the models before they are wrapped, and return the models to use.

        Args:
            models: the registered models, on `device`.
            optimizers: the registered optimizers, which must stay the same objects.
            arguments: ``apex_args`` of ``register``, only for Apex.
        """
        return models

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for forward passes in this precision."""
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """Add the gradients of `loss` to the existing ones.

        Args:
            loss: a tensor of one element.
            is_last: whether an update may follow, instead of further backward passes.
        """
        loss.backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients of `optimizer`, for clipping. Call at most once before `step`."""

    def parameters(self, optimizer: torch.optim.Optimizer) -> Sequence[torch.Tensor]:
        """Return the tensors that `optimizer` updates."""
        return [p for group in optimizer.param_groups for p in group["params"]]

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the parameters, unless gradients have overflowed."""
        optimizer.step()

    def scale_state(self) -> dict[str, Any]:
        """Return the numbers that are saved under `state_key`."""
        return {}

    def load_scale_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of `scale_state`."""

    def scale_problem(self, state: Any) -> str:
        """Return why `load_scale_state` cannot load a state. Return "" if it can."""
        return "" if isinstance(state, Mapping) else f"it is {type(state).__name__}, not a dict"

    def state_dict(self) -> dict[str, Any]:
        return {self.state_key: self.scale_state()} if self.scales and self.state_key else {}

    def check_state(self, state: Mapping[str, Any]) -> None:
        key = self.state_key or ""
        if self.scales and key in state and (problem := self.scale_problem(state[key])):
            raise CheckpointError(f"The state's {key!r} is no state of a scaler: {problem}.")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.scales and (key := self.state_key or "") in state:
            self.load_scale_state(state[key])
