"""The supported precisions: full, ``torch.amp``, and NVIDIA Apex."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from raysgd._internal.arguments import is_number
from raysgd.errors import CheckpointError
from raysgd.loop.feature import StepFeature

_NATIVE, _APEX = "amp_native", "amp_apex"
"""Keys in the state."""


class Precision(StepFeature):
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
        """Return the models to wrap and use. The optimizers must stay the same objects."""
        return models

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for forward passes in this precision."""
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """Add the gradients of `loss`. An update may follow if it `is_last`."""
        loss.backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients, for clipping. Called at most once before `step`."""

    def parameters(self, optimizer: torch.optim.Optimizer) -> Sequence[torch.Tensor]:
        return [p for group in optimizer.param_groups for p in group["params"]]

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the parameters, unless gradients have overflowed."""
        optimizer.step()


class NativeAmp(Precision):
    """Autocasts forward passes, and scales the loss if the dtype is float16.

    One scaler serves all optimizers, so each of them can step once in a training step. The scale
    changes after all optimizers have stepped, or at `commit`.

    ``dtype=None`` means float16 on a GPU, and bfloat16 on a CPU.
    """

    name: ClassVar[str] = "native AMP (use_fp16=True)"

    def __init__(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        super().__init__(device)
        default = torch.bfloat16 if device.type == "cpu" else torch.float16
        self.dtype = default if dtype is None else dtype
        # bfloat16 has the range of float32, and needs no scaler.
        self.scaler = self._new_scaler() if self.dtype is torch.float16 else None
        self.scales = self.scaler is not None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._stepped: set[int] = set()
        self._is_checked = False

    def _new_scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self.device.type)

    def prepare(
        self,
        models: list[torch.nn.Module],
        optimizers: list[torch.optim.Optimizer],
        arguments: Mapping[str, Any] | None,
    ) -> list[torch.nn.Module]:
        self._optimizers = optimizers
        return super().prepare(models, optimizers, arguments)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.amp.autocast(self.device.type, dtype=self.dtype)

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, and check them for overflows."""
        if self.scaler is not None and self._has_gradients(optimizer):
            self._is_checked = True  # set this first, because unscale_ may raise halfway
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.scaler is None or not self._has_gradients(optimizer):
            optimizer.step()
            return
        self._is_checked = True
        self.scaler.step(optimizer)
        self._stepped.add(id(optimizer))
        if all(id(registered) in self._stepped for registered in self._optimizers):
            self.commit()

    def commit(self) -> None:
        if self._is_checked and self.scaler is not None:
            self.scaler.update()
            self._is_checked = False
            self._stepped.clear()

    def roll_back(self) -> None:
        """Keep the scale, and discard the results of overflow checks."""
        if self._is_checked and self.scaler is not None:
            state = self.scaler.state_dict()
            self.scaler = self._new_scaler()
            self.scaler.load_state_dict(state)
            self._is_checked = False
            self._stepped.clear()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaler is None else {_NATIVE: self.scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.scaler is not None and _NATIVE in state:
            self.scaler.load_state_dict(dict(state[_NATIVE]))

    def check_state(self, state: Mapping[str, Any]) -> None:
        if self.scaler is None or _NATIVE not in state:
            return
        saved, keys = state[_NATIVE], self.scaler.state_dict().keys()
        if not isinstance(saved, Mapping) or not all(is_number(saved.get(key)) for key in keys):
            raise CheckpointError(
                f"Cannot load {_NATIVE!r} of the state: {saved!r} is not a dict with the "
                f"numbers of a GradScaler: {', '.join(keys)}."
            )

    def _has_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether any gradient exists; GradScaler raises if there is none."""
        return any(parameter.grad is not None for parameter in self.parameters(optimizer))


class ApexAmp(Precision):
    """Passes models and optimizers to ``apex.amp``, whose ``opt_level`` selects the dtype.

    Apex keeps its state in Python modules, so a process can use only one `ApexAmp`.
    """

    name: ClassVar[str] = 'Apex (use_fp16="apex")'
    scales = True

    def __init__(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        super().__init__(device)
        try:
            self._amp: Any = importlib.import_module("apex.amp")
        except ImportError as error:
            raise ImportError(
                f'use_fp16="apex" needs NVIDIA Apex on every worker, but importing it failed here: '
                f"{error}. Build it from https://github.com/NVIDIA/apex, or pass use_fp16=True for "
                "the mixed precision of PyTorch."
            ) from error
        self._optimizers: list[torch.optim.Optimizer] = []

    def prepare(
        self,
        models: list[torch.nn.Module],
        optimizers: list[torch.optim.Optimizer],
        arguments: Mapping[str, Any] | None,
    ) -> list[torch.nn.Module]:
        self._optimizers = optimizers
        patched, _ = self._amp.initialize(models, optimizers, **(arguments or {}))
        return list(patched)

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        # Accumulated gradients stay scaled until the last backward pass.
        with self._amp.scale_loss(loss, self._optimizers, delay_unscale=not is_last) as scaled:
            scaled.backward()

    def parameters(self, optimizer: torch.optim.Optimizer) -> Sequence[torch.Tensor]:
        return list(self._amp.master_params(optimizer))

    def state_dict(self) -> dict[str, Any]:
        return {_APEX: dict(self._amp.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if _APEX in state:
            self._amp.load_state_dict(dict(state[_APEX]))


PRECISIONS: dict[bool | str, Callable[[torch.device, torch.dtype | None], Precision]] = {
    False: Precision,
    True: NativeAmp,
    "apex": ApexAmp,
}
"""Allowed values of ``use_fp16``. Each class takes a device and ``amp_dtype``."""
