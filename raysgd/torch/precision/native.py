"""Mixed precision with ``torch.amp``."""

import contextlib
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from raysgd._internal.arguments import is_number
from raysgd.errors import CheckpointError
from raysgd.loop.update import Update
from raysgd.torch.precision.base import Precision

_KEY = "amp_native"


class NativeAmp(Precision):
    """Autocasts forward passes, and scales the loss if the dtype is float16.

    One scaler serves all optimizers, so each of them can step once in a training step. The scale
    changes after all optimizers have stepped, or at `commit`.

    ``dtype=None`` means float16 on a GPU, and bfloat16 on a CPU.
    """

    name: ClassVar[str] = "native AMP (use_fp16=True)"
    takes_dtype: ClassVar[bool] = True

    def __init__(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        default = torch.bfloat16 if device.type == "cpu" else torch.float16
        super().__init__(device, default if dtype is None else dtype)
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
        return {} if self.scaler is None else {_KEY: self.scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.scaler is not None and _KEY in state:
            self.scaler.load_state_dict(dict(state[_KEY]))

    def check_state(self, state: Mapping[str, Any]) -> None:
        if self.scaler is None or _KEY not in state:
            return
        saved, keys = state[_KEY], self.scaler.state_dict().keys()
        if not isinstance(saved, Mapping) or not all(is_number(saved.get(key)) for key in keys):
            raise CheckpointError(
                f"Cannot load {_KEY!r} of the state: {saved!r} is not a dict with the "
                f"numbers of a GradScaler: {', '.join(keys)}."
            )
