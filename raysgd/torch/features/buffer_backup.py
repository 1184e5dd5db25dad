"""Restore buffers if an update is discarded."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from raysgd._internal.collectives import Collectives
from raysgd.loop.feature import UpdateFeature
from raysgd.loop.update import Update
from raysgd.torch.tensors import can_copy, copies_of


class BufferBackup(UpdateFeature):
    """Copies all buffers at the end of a step, and restores them if the next step is discarded.

    A copy belongs to a module and a name, because a forward pass may assign another tensor.
    """

    def __init__(self, models: Iterable[torch.nn.Module], collectives: Collectives) -> None:
        self._collectives = collectives
        self._slots = [
            (module, name)
            for model in models
            for module in model.modules()
            for name in module._buffers  # `named_buffers` omits buffers that are None
        ]
        self._outside_norms = [slot for slot in self._slots if not isinstance(slot[0], _BatchNorm)]
        self.values: list[torch.Tensor | None] = []
        self._values_at_step: list[torch.Tensor | None] = []
        self.take()

    def tensors(self) -> list[torch.Tensor | None]:
        return [module._buffers.get(name) for module, name in self._slots]

    def begin_micro_batch(self, update: Update) -> None:
        """Begin each micro-batch of a step with the same buffers, except running statistics."""
        if self._outside_norms and update.is_split:
            if not update.begins_step:
                self.write(self._values_at_step, self._outside_norms)
            values = [module._buffers.get(name) for module, name in self._outside_norms]
            self._values_at_step = copies_of(values)

    def begin_call(self, logs_steps: bool) -> None:
        self.take()  # user code may have changed them between calls

    def commit(self, update: Update) -> None:
        if update.bad_step is not None:  # nothing of the update is applied
            self.write(self.values)
        self.take()

    def take(self) -> None:
        """Copy the buffers."""
        if self._slots:
            self.values = copies_of(self.tensors())

    def roll_back(self, update: Update) -> None:
        self.write(self.values)

    def write(self, values: Sequence[torch.Tensor | None], slots: Sequence[Any] = ()) -> None:
        """Write the values into the buffers, in the order of `tensors` or of `slots`."""
        for (module, name), value in zip(slots or self._slots, values, strict=True):
            if name in module._buffers:  # user code may have replaced it with a parameter
                _set_buffer(module, name, value)

    def receive(self, leader_rank: int) -> Callable[[], None]:
        values = self._collectives.broadcast(self.tensors, leader_rank)

        def load() -> None:
            self.write(values)
            self.take()

        return load

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.take()


def _set_buffer(module: torch.nn.Module, name: str, value: torch.Tensor | None) -> None:
    buffer: Any = getattr(module, name, None)
    if (
        value is not None
        and can_copy(buffer, value)
        and (buffer.shape, buffer.dtype) == (value.shape, value.dtype)
        and buffer.layout is torch.strided
        and 0 not in buffer.stride()  # elements of an expanded tensor share memory
    ):
        buffer.detach().copy_(value)
    else:
        setattr(module, name, None if value is None else value.clone())
