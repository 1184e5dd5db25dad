"""State of one rank for the others, and how to tell whether they need it."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

from raysgd.torch import collectives
from raysgd.trees import map_leaves

__all__ = ["broadcast_state", "broadcast_tensors", "fingerprint"]


def broadcast_tensors(
    tensors: Sequence[torch.Tensor], source: int, to: Sequence[int] | None = None
) -> None:
    """Overwrite `tensors` with those of rank `source`, in few large messages.

    Tensors of one dtype and device travel together, in messages of at most 64 MiB.

    Args:
        tensors: of the same sizes on all ranks.
        source: the rank that has them.
        to: the only ranks that take part beside; None for all.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for members in groups.values():
        start, size = 0, 0
        for stop, tensor in enumerate(members, start=1):
            size += tensor.numel() * tensor.element_size()
            if size >= 64 * 2**20 or stop == len(members):
                _broadcast_flat(members[start:stop], source, to)
                start, size = stop, 0


def _broadcast_flat(
    tensors: list[torch.Tensor], source: int, to: Sequence[int] | None = None
) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    collectives.broadcast(flat, source, to)
    if collectives.rank() == source:
        return
    start = 0
    for tensor in tensors:
        stop = start + tensor.numel()
        tensor.copy_(flat[start:stop].view_as(tensor))
        start = stop


def broadcast_state(
    make_state: Callable[[], Any],
    source: int,
    device: torch.device,
    to: Sequence[int] | None = None,
) -> Any:
    """Return rank `source`'s state on every rank: nested dicts, lists and tuples with tensors.

    The structure travels as a pickle, the tensors by themselves; `make_state` is called on
    rank `source` alone. Tensors come back on the device kind that they have there.

    Args:
        make_state: returns the state.
        source: the rank that has it.
        device: this rank's.
        to: the only ranks that take part beside; None for all.
    """
    leads = collectives.rank() == source
    state = make_state() if leads else None
    tensors: list[torch.Tensor] = []
    structure = _take_tensors(state, tensors) if leads else None
    structure = collectives.broadcast_object(structure, source, to)
    if leads:
        broadcast_tensors(tensors, source, to)
        return state
    received: list[torch.Tensor] = []
    result = _make_tensors(structure, received, device)
    broadcast_tensors(received, source, to)
    return result


def fingerprint(state: Any) -> bytes:
    """Return what two ranks can compare instead of nested dicts, lists and tuples with tensors.

    Of each tensor it has the sum and the exclusive or of its bits, in words of 64. Two words that
    change places are not noticed; training does not do that. It costs no more than to read the
    tensor, on its device. What cannot be compared is equal to nothing.
    """

    def summary(leaf: Any) -> Any:
        return _bits(leaf) if isinstance(leaf, torch.Tensor) else leaf

    with io.BytesIO() as file:
        pickler = pickle.Pickler(file)
        pickler.fast = True  # else equal texts that are one object differ from two
        try:
            pickler.dump(map_leaves(state, summary))
        except Exception:  # cycles, most likely: a scheduler that holds a method of its own
            return os.urandom(32)
        return hashlib.sha256(file.getvalue()).digest()


def _bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    content = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    if content.storage_offset() % 8:
        content = content.clone()  # words begin at multiples of their size
    num_whole = content.numel() // 8 * 8
    words, rest = content[:num_whole].view(torch.int64), content[num_whole:].tolist()
    bits = (int(words.sum()), int(torch.hash_tensor(words).view(torch.int64))) if num_whole else ()
    return (str(tensor.dtype), tuple(tensor.shape), *bits, *rest)


class _Slot:
    """Stands for a tensor in the structure that travels."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.on_cpu = tensor.device.type == "cpu"


def _take_tensors(tree: Any, tensors: list[torch.Tensor]) -> Any:
    def take(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return _Slot(leaf)

    return map_leaves(tree, take)


def _make_tensors(tree: Any, tensors: list[torch.Tensor], device: torch.device) -> Any:
    def make(leaf: Any) -> Any:
        if not isinstance(leaf, _Slot):
            return leaf
        target = torch.device("cpu") if leaf.on_cpu else device
        tensors.append(torch.empty(leaf.shape, dtype=leaf.dtype, device=target))
        return tensors[-1]

    return map_leaves(tree, make)
