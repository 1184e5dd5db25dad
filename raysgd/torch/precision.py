"""The supported precisions. To add one, add a subclass of `Precision` and a line to the table."""

import contextlib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from raysgd._internal.arguments import is_number
from raysgd.errors import CheckpointError
from raysgd.loop.feature import UpdateFeature
from raysgd.loop.update import Update
from raysgd.torch.tensors import parameters_of

_NATIVE_KEY, _APEX_KEY = "amp_native", "amp_apex"
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
    scales_loss: bool = False
    """Whether the loss is scaled, so that a step can overflow and be skipped."""

    def __init__(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self.device = device
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
        self.scales_loss = self.dtype is torch.float16
        self.scaler = torch.amp.GradScaler(device.type) if self.scales_loss else None
        self._reset()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.amp.autocast(self.device.type, dtype=self.dtype)

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def scaler_tensors(self) -> Any:
        if (scaler := self.scaler) is None:
            return ()
        if scaler._scale is None:
            scaler.scale(torch.zeros((), device=self.device))  # creates it
        return scaler._scale, scaler._growth_tracker  # the public getters wait for a GPU

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale once, and check them for overflows."""
        if self.scaler is None or id(optimizer) in self._unscaled:
            return
        if any(p.grad is not None for p in self.parameters(optimizer)):  # otherwise, it would raise
            self._unscaled.add(id(optimizer))  # first, because unscale_ may raise halfway
            self.scaler.unscale_(optimizer)
            if "grad_scaler" in inspect.signature(optimizer.step).parameters:
                vars(optimizer)["_step_supports_amp_scaling"] = False  # it would unscale them again

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        with contextlib.suppress(ValueError):  # some fused optimizers alone take float16 gradients
            self.unscale(optimizer)  # also for these, whose hooks would see scaled gradients
        if self.scaler is None or id(optimizer) not in self._unscaled:
            optimizer.step()
            return
        self.scaler.step(optimizer)
        self._stepped.add(id(optimizer))
        if all(id(registered) in self._stepped for registered in self._optimizers):
            self._update_scale()

    def commit(self, update: Update) -> None:
        self._update_scale()

    def _update_scale(self) -> None:
        if self._unscaled and self.scaler is not None:
            self.scaler.update()
            self._reset()

    def _reset(self) -> None:
        self._stepped: set[int] = set()  # the IDs of optimizers
        self._unscaled: set[int] = set()  # whose gradients were checked for overflows

    def roll_back(self, update: Update) -> None:
        """Keep the scale, and discard the results of overflow checks."""
        if self._unscaled and self.scaler is not None:
            state = self.scaler.state_dict()
            self.scaler = torch.amp.GradScaler(self.device.type)
            self.scaler.load_state_dict(state)
            self._reset()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaler is None else {_NATIVE_KEY: self.scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.scaler is not None and _NATIVE_KEY in state:
            self.scaler.load_state_dict(dict(state[_NATIVE_KEY]))

    def check_state(self, state: Mapping[str, Any]) -> None:
        if self.scaler is None or _NATIVE_KEY not in state:
            return
        saved, keys = state[_NATIVE_KEY], self.scaler.state_dict().keys()
        if not isinstance(saved, Mapping) or not all(is_number(saved.get(key)) for key in keys):
            raise CheckpointError(
                f"Cannot load {_NATIVE_KEY!r} of the state: {saved!r} is not a dict with the "
                f"numbers of a GradScaler: {', '.join(keys)}."
            )


class ApexAmp(Precision):
    """Passes models and optimizers to ``apex.amp``, whose ``opt_level`` selects the dtype.

    Apex keeps its state in Python modules, so a process can use only one `ApexAmp`.
    """

    name: ClassVar[str] = 'Apex (use_fp16="apex")'
    scales_loss = True

    def __init__(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        super().__init__(device)
        try:
            self._amp: Any = importlib.import_module("apex.amp")
        except ImportError as error:
            raise ImportError(
                f'use_fp16="apex" needs NVIDIA Apex on every worker, but importing it failed here: '
                f"{error}. The apex of the package index is another project: pip uninstall apex. "
                "Build a version with apex.amp from https://github.com/NVIDIA/apex, or pass "
                "use_fp16=True for the mixed precision of PyTorch."
            ) from error

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
        return {_APEX_KEY: dict(self._amp.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if _APEX_KEY in state:
            self._amp.load_state_dict(dict(state[_APEX_KEY]))


PRECISIONS: dict[bool | str, Callable[[torch.device, torch.dtype | None], Precision]] = {
    False: Precision,
    True: NativeAmp,
    "apex": ApexAmp,
}
"""Allowed values of ``use_fp16``. Each class takes a device and ``amp_dtype``."""


def to_full_precision(value: Any) -> Any:
    """Convert a tensor of 16-bit floats to float32. Return other values unchanged."""
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_half else value
