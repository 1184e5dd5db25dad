"""Copies of buffers, because a forward pass changes buffers even if its step fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from raysgd.loop.feature import StepFeature
from raysgd.torch.state import buffer_names, copy_all

if TYPE_CHECKING:
    from raysgd.torch.train_state import TorchTrainState


class BufferCopies(StepFeature):
    """Copies all buffers at the end of a step, and restores them if the next step is discarded.

    A copy belongs to a module and a name, because a forward pass may assign another tensor.
    """

    def __init__(
        self, models: Iterable[torch.nn.Module] = (), state: TorchTrainState | None = None
    ) -> None:
        self._state = state
        self._slots = [
            (module, name)
            for model in models
            for module in model.modules()
            for name in buffer_names(module)
        ]
        self._copies: list[torch.Tensor | None] = [None] * len(self._slots)
        self.commit()

    def tensors(self) -> list[torch.Tensor | None]:
        found = [getattr(module, name, None) for module, name in self._slots]
        return [None if buffer is None else buffer.detach() for buffer in found]

    def commit(self) -> None:
        copies, buffers = [], []
        for index, buffer in enumerate(self.tensors()):
            copy = self._copies[index]
            if buffer is None:
                self._copies[index] = None
                continue
            if copy is None or copy.shape != buffer.shape or copy.dtype != buffer.dtype:
                copy = self._copies[index] = torch.empty_like(buffer)
            copies.append(copy)
            buffers.append(buffer)
        copy_all(copies, buffers)

    def roll_back(self) -> None:
        for slot, copy in zip(self._slots, self._copies, strict=True):
            _set_buffer(*slot, copy)

    def set(self, values: Sequence[torch.Tensor | None]) -> None:
        for slot, value in zip(self._slots, values, strict=True):
            _set_buffer(*slot, value)
        self.commit()

    def receive(self, leader: int) -> Callable[[], None]:
        assert self._state is not None
        values = self._state.from_rank(self.tensors, leader)
        return lambda: self.set(values)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.commit()


def _set_buffer(module: torch.nn.Module, name: str, value: torch.Tensor | None) -> None:
    buffer = getattr(module, name, None)
    if value is None:
        setattr(module, name, None)
    elif (
        buffer is not None
        and buffer.shape == value.shape
        and buffer.layout is torch.strided
        and 0 not in buffer.stride()  # elements of an expanded tensor share memory
    ):
        buffer.detach().copy_(value)
    else:
        setattr(module, name, value.clone())
