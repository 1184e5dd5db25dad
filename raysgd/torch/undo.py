"""What a step that was given up has changed, taken back: optimizers' work, and buffers."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from raysgd.trees import map_leaves

__all__ = ["BufferLog", "UndoLog", "UpdateWatch"]

_NUM_COMPARED = 2
"""After how many steps each buffer is compared with what is remembered of it."""


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

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
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


class UpdateWatch:
    """Knows whether an update that failed has changed anything, by torch's counts of changes.

    To copy what an optimizer changes, for the case that memory runs out in it, would take the
    memory. What it makes at its first step, which is when it most likely runs out, is taken back.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._state = {key: dict(held) for key, held in optimizer.state.items()}
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        for held in self._state.values():
            tensors += [value for value in held.values() if isinstance(value, torch.Tensor)]
        self._versions = [(tensor, tensor._version) for tensor in tensors]

    def take_back(self) -> bool:
        """Take back what the update has made; returns whether that is all that it has done."""
        if any(tensor._version != version for tensor, version in self._versions):
            return False
        self.optimizer.state.clear()
        self.optimizer.state.update(self._state)
        return True


class BufferLog:
    """Remembers buffers, since a forward pass changes them also in a step that then fails.

    What a step has not changed is not copied again: most large buffers are tables and masks. torch
    counts the changes of a tensor (``_version``), but not those by its normalization layers, which
    are always copied, and not those through ``tensor.data``. A buffer that changes in such a way in
    one of the first steps is always copied from then on. In any other, what a failed step has
    changed without torch's knowledge stays, and is not sent to other ranks for it.

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
        # each buffer, weakly, and its version as it was copied; None: copied in any case
        self._seen: list[tuple[weakref.ref[torch.Tensor], int] | None] = [None] * len(self._slots)
        self._copies: list[torch.Tensor | None] = [None] * len(self._slots)
        # buffers as all ranks had the same, and those that were overwritten for that
        self._equal: dict[int, tuple[weakref.ref[torch.Tensor], int] | None] = {}
        self._overwritten: set[int] = set()
        # what they were overwritten by, while it is compared with what a step leaves
        self._received: dict[int, torch.Tensor] = {}
        self._num_steps = 0
        self.remember()

    def tensors(self) -> list[torch.Tensor | None]:
        """Return the buffers; None for one that a forward pass has removed."""
        found = [module._buffers.get(name) for module, name in self._slots]
        return [None if buffer is None else buffer.detach() for buffer in found]

    def remember_step(self) -> None:
        """Remember what a step has changed."""
        if self._num_steps < _NUM_COMPARED and self._slots:
            self._num_steps += 1
            self._compare()
        self.remember()

    def remember(self) -> None:
        """Remember what has changed."""
        changed, copies = [], []
        for index, (module, name) in enumerate(self._slots):
            buffer = module._buffers.get(name)
            if buffer is None:
                self._copies[index] = self._seen[index] = None
                continue
            copy, is_ours = self._copies[index], index not in self._overwritten
            if copy is not None and is_ours and self._is_unchanged(index, buffer):
                continue
            if copy is None or copy.shape != buffer.shape:
                copy = torch.empty_like(buffer)
            changed.append((index, buffer, copy))
            copies.append(copy)
        if changed:
            torch._foreach_copy_(copies, [buffer.detach() for _, buffer, _ in changed])
        for index, buffer, copy in changed:
            self._copies[index] = copy
            self._note(index, buffer)
        self._overwritten.clear()
        self._received.clear()

    def slots_of(self, modules: Iterable[torch.nn.Module]) -> list[int]:
        """Return the buffers of some modules."""
        ids = {id(module) for module in modules}
        return [index for index, (module, _) in enumerate(self._slots) if id(module) in ids]

    def have_changed(self, slots: Iterable[int]) -> bool:
        """Whether any of these may have changed since `note_overwritten`."""
        for index in slots:
            module, name = self._slots[index]
            buffer, equal = module._buffers.get(name), self._equal.get(index)
            if buffer is None or self._uncounted[index] or not _is_same(equal, buffer):
                return True
        return False

    def note_overwritten(self, slots: Iterable[int]) -> None:
        """Note that these have been overwritten by those of rank 0, which torch has not counted."""
        for index in slots:
            module, name = self._slots[index]
            if (buffer := module._buffers.get(name)) is not None:
                self._equal[index] = _version_of(buffer)
                if self._num_steps < _NUM_COMPARED:
                    self._received[index] = buffer.detach().clone()
        self._overwritten.update(slots)

    def _is_unchanged(self, index: int, buffer: torch.Tensor) -> bool:
        return not self._uncounted[index] and _is_same(self._seen[index], buffer)

    def _note(self, index: int, buffer: torch.Tensor) -> None:
        self._seen[index] = _version_of(buffer)

    def _compare(self) -> None:
        for index, (module, name) in enumerate(self._slots):
            buffer, copy = module._buffers.get(name), self._copies[index]
            if index in self._overwritten:
                copy = self._received.get(index)
            if buffer is None or copy is None:
                continue
            if not self._is_unchanged(index, buffer):
                continue
            try:
                self._uncounted[index] = not torch.equal(copy, buffer)
            except (NotImplementedError, RuntimeError):  # of a sparse one, say
                self._uncounted[index] = True

    def restore(self) -> None:
        """Take back what has changed since."""
        if self._num_steps < _NUM_COMPARED:
            self._compare()
        for index, (module, name) in enumerate(self._slots):
            buffer, copy = module._buffers.get(name), self._copies[index]
            if buffer is not None and self._is_unchanged(index, buffer):
                continue
            self._set(index, copy)

    def set(self, values: Sequence[torch.Tensor | None]) -> None:
        """Let the buffers have the values of another worker's `tensors`, and remember those."""
        for index, value in zip(range(len(self._slots)), values, strict=True):
            self._set(index, value)
        self.remember()

    def _set(self, index: int, value: torch.Tensor | None) -> None:
        module, name = self._slots[index]
        buffer = module._buffers.get(name)
        if value is None:
            if name in module._buffers:
                module._buffers[name] = None
            return
        if buffer is None or buffer.shape != value.shape or not _is_writable(buffer):
            buffer = module._buffers[name] = value.clone()
        else:
            buffer.detach().copy_(value)
        if value is self._copies[index]:
            self._note(index, buffer)


def _version_of(buffer: torch.Tensor) -> tuple[weakref.ref[torch.Tensor], int] | None:
    """Return what is another when a buffer has changed; None where torch does not count that."""
    return None if buffer.is_inference() else (weakref.ref(buffer), buffer._version)


def _is_same(version: tuple[weakref.ref[torch.Tensor], int] | None, buffer: torch.Tensor) -> bool:
    return version is not None and version[0]() is buffer and version[1] == buffer._version


def _is_writable(buffer: torch.Tensor) -> bool:
    """Whether other values can be written to a buffer in its place."""
    return buffer.layout is torch.strided and not buffer.is_inference()
