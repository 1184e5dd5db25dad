"""Tensor and module helpers that PyTorch offers only under private names."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def buffer_names(module: torch.nn.Module) -> list[str]:
    """Return the names of a module's own buffers. `named_buffers` omits buffers that are None."""
    return list(module._buffers)


def copy_all(into: Iterable[torch.Tensor], content: Iterable[torch.Tensor]) -> None:
    """Copy each tensor of `content` into the corresponding tensor of `into`.

    On a GPU, one kernel copies many tensors of one dtype.
    """
    if into := list(into):
        torch._foreach_copy_(into, list(content))


def multiply_all(tensors: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply tensors in place. On a GPU, one kernel multiplies many tensors."""
    if tensors := list(tensors):
        torch._foreach_mul_(tensors, factor)


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place."""
    return tensor._version
