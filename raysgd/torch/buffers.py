"""Buffers of models, as they were after the last step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["BufferLog"]

_NUM_COMPARED = 2
"""After how many steps each buffer is compared with what is remembered of it."""


class BufferLog:
    """Remembers buffers, since a forward pass changes them also in a step that then fails.

    What a step has not changed is not copied again: most large buffers are tables and masks. torch
    counts the changes of a tensor (``_version``), but not those by its normalization layers, which
    are copied always, nor those through ``tensor.data``. What changes in that way in one of the
    first steps is copied always from then on.

    Buffers are known by module and name, since a forward pass may put another tensor in a place.
    """

    def __init__(self, models: Iterable[torch.nn.Module] = ()) -> None:
        self._slots = [
            (module, name)
            for model in models
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._uncounted = [isinstance(module, _NormBase) for module, _ in self._slots]
        self._seen: list[tuple[torch.Tensor, int] | None] = [None] * len(self._slots)
        """Each buffer and its version as it was copied."""
        self._copies = [torch.empty_like(buffer) for buffer in self.tensors()]
        self._num_steps = 0
        self.remember()

    def tensors(self) -> list[torch.Tensor]:
        """Return the buffers."""
        return [self._tensor(index).detach() for index in range(len(self._slots))]

    def _tensor(self, index: int) -> torch.Tensor:
        """Return a buffer; what is remembered of it where a forward pass has removed it."""
        module, name = self._slots[index]
        buffer = module._buffers.get(name)
        return self._copies[index] if buffer is None else buffer

    def remember_step(self) -> None:
        """Remember what a step has changed."""
        if self._num_steps < _NUM_COMPARED and self._slots:
            self._num_steps += 1
            self._compare()
        self.remember()

    def remember(self) -> None:
        """Remember what has changed."""
        sources, copies = [], []
        for index, uncounted in enumerate(self._uncounted):
            buffer = self._tensor(index)
            if not uncounted and self._is_seen(index, buffer):
                continue
            if self._copies[index].shape != buffer.shape:
                self._copies[index] = torch.empty_like(buffer)
            sources.append(buffer.detach())
            copies.append(self._copies[index])
            self._note(index, buffer)
        if sources:
            torch._foreach_copy_(copies, sources)

    def _is_seen(self, index: int, buffer: torch.Tensor) -> bool:
        seen = self._seen[index]
        return seen is not None and seen[0] is buffer and seen[1] == buffer._version

    def _note(self, index: int, buffer: torch.Tensor) -> None:
        # torch counts nothing for those that were made in inference mode
        self._seen[index] = None if buffer.is_inference() else (buffer, buffer._version)

    def _compare(self) -> None:
        for index, uncounted in enumerate(self._uncounted):
            buffer = self._tensor(index)
            if uncounted or not self._is_seen(index, buffer):
                continue
            self._uncounted[index] = not torch.equal(self._copies[index], buffer)

    def restore(self) -> None:
        """Take back what has changed since."""
        self.set(self._copies)

    def set(self, values: Sequence[torch.Tensor]) -> None:
        """Let the buffers have other values, and remember those."""
        for index, ((module, name), value) in enumerate(zip(self._slots, values, strict=True)):
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.shape == value.shape:
                buffer.detach().copy_(value)
            else:
                module._buffers[name] = value.clone()
            if value is self._copies[index]:
                self._note(index, self._tensor(index))
        self.remember()
