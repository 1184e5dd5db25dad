"""Take back what a discarded step has changed: updates of optimizers, and buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from raysgd.trees import map_leaves

__all__ = ["BufferCopies", "UndoLog"]


class UndoLog:
    """Remembers parameters and optimizer states as they were before a step.

    Where several optimizers are registered, a step can fail when some have made their update and
    others have not. What those changed has to be taken back, or a repeated step would update it
    twice. The copies stay on the device, and their room is used again in the next step.
    """

    def __init__(self) -> None:
        self._images: dict[int, _BeforeImage] = {}
        self._pending: list[_BeforeImage] = []

    def remember(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember what `optimizer` is about to change, unless that is remembered already."""
        image = self._images.setdefault(id(optimizer), _BeforeImage(optimizer))
        if image not in self._pending:
            image.take()
            self._pending.append(image)

    def holds(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Whether what `optimizer` does can be undone."""
        return any(image.optimizer is optimizer for image in self._pending)

    def roll_back(self) -> list[torch.optim.Optimizer]:
        """Undo all that was done to what is remembered, and forget it; return whose work it was."""
        undone = []
        while self._pending:  # the last first: optimizers may share a parameter
            image = self._pending.pop()
            image.restore()
            undone.append(image.optimizer)
        return undone

    def forget(self) -> None:
        """Let what was done stay."""
        self._pending.clear()


class _BeforeImage:
    """One optimizer's parameters and state.

    All that may get a gradient is taken, and not only what has one: a closure computes gradients
    within the step, and a second step may have others than the first.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._state: dict[Any, Any] = {}
        self._groups: list[dict[str, Any]] = []
        self._tensors: dict[Any, list[torch.Tensor]] = {}
        self._copies: dict[Any, list[torch.Tensor]] = {}

    @torch.no_grad()
    def take(self) -> None:
        self._tensors = {}
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad or parameter.grad is not None:
                    self._note(parameter)
        self._state = map_leaves(self.optimizer.state, self._note)
        # where some keep what they have learnt of the step size
        self._groups = [
            {key: map_leaves(value, self._note) for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        for kind, tensors in self._tensors.items():
            copies = self._copies.get(kind, [])
            if [c.shape for c in copies] != [t.shape for t in tensors]:
                copies = self._copies[kind] = [torch.empty_like(t) for t in tensors]
            torch._foreach_copy_(copies, tensors)

    def _note(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            # by kind, since one kernel copies many tensors only where they are alike
            self._tensors.setdefault((leaf.device, leaf.dtype), []).append(leaf)
        return leaf

    @torch.no_grad()
    def restore(self) -> None:
        for kind, tensors in self._tensors.items():
            torch._foreach_copy_(tensors, self._copies[kind])
        self.optimizer.state.clear()
        self.optimizer.state.update(self._state)
        for group, before in zip(self.optimizer.param_groups, self._groups, strict=False):
            for name in group.keys() - before.keys() - {"params"}:
                del group[name]
            group.update(before)


class BufferCopies:
    """Copies of all buffers, because a forward pass changes them also in a step that then fails.

    A buffer is known by its module and its name: a forward pass may assign another tensor.
    """

    def __init__(self, models: Iterable[torch.nn.Module] = ()) -> None:
        self._slots = [
            (module, name)
            for model in models
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._copies: list[torch.Tensor | None] = [None] * len(self._slots)
        self.remember()

    def tensors(self) -> list[torch.Tensor | None]:
        """Return the buffers; None for one that a forward pass has removed."""
        found = [module._buffers.get(name) for module, name in self._slots]
        return [None if buffer is None else buffer.detach() for buffer in found]

    def remember(self) -> None:
        """Copy the buffers, reusing the memory of the copies before."""
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
        if copies:
            torch._foreach_copy_(copies, buffers)

    def restore(self) -> None:
        """Give the buffers the values of the copies."""
        for slot, copy in zip(self._slots, self._copies, strict=True):
            _set_buffer(*slot, copy)

    def set(self, values: Sequence[torch.Tensor | None]) -> None:
        """Give the buffers the values of another worker's `tensors`, and copy those."""
        for slot, value in zip(self._slots, values, strict=True):
            _set_buffer(*slot, value)
        self.remember()


def _set_buffer(module: torch.nn.Module, name: str, value: torch.Tensor | None) -> None:
    buffer = module._buffers.get(name)
    if value is None:
        if name in module._buffers:
            module._buffers[name] = None
    elif buffer is None or buffer.shape != value.shape or not _is_writable(buffer):
        module._buffers[name] = value.clone()
    else:
        buffer.detach().copy_(value)


def _is_writable(buffer: torch.Tensor) -> bool:
    if buffer.layout is not torch.strided or buffer.is_inference():
        return False
    return 0 not in buffer.stride()  # an expanded tensor has several elements in one place
