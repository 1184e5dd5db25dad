"""What optimizers have changed in a step that was given up, taken back."""

from __future__ import annotations

from typing import Any

import torch

from raysgd.trees import map_leaves

__all__ = ["UndoLog"]


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

    def roll_back(self) -> None:
        """Undo all that was done to what is remembered, and forget it."""
        while self._pending:  # the last first: optimizers may share a parameter
            self._pending.pop().restore()

    def forget(self) -> None:
        """Let what was done stay."""
        self._pending.clear()


class _BeforeImage:
    """One optimizer's parameters and state.

    All that may get a gradient is taken, and not only what has one: a closure computes gradients
    within the step, and a second step may have others than the first.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state: dict[Any, Any] = {}
        self._groups: list[dict[str, Any]] = []
        self._tensors: dict[Any, list[torch.Tensor]] = {}
        self._copies: dict[Any, list[torch.Tensor]] = {}

    @torch.no_grad()
    def take(self) -> None:
        self._tensors = {}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad or parameter.grad is not None:
                    self._note(parameter)
        self._state = map_leaves(self._optimizer.state, self._note)
        # where some keep what they have learnt of the step size
        self._groups = [
            {key: map_leaves(value, self._note) for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
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
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for group, before in zip(self._optimizer.param_groups, self._groups, strict=False):
            for name in group.keys() - before.keys() - {"params"}:
                del group[name]
            group.update(before)
