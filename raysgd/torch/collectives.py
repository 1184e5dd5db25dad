"""What workers tell each other beside gradients, by torch.distributed or by Horovod."""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from raysgd._internal.nested import map_leaves

__all__ = [
    "broadcast",
    "broadcast_object",
    "broadcast_state",
    "broadcast_tensors",
    "fewest_receivers",
    "fingerprint",
    "mean",
    "minimum",
    "rank",
    "ranks_with",
    "size",
]

_MESSAGE_BYTES = 64 * 2**20
"""The size from which on tensors no longer travel together."""


def _horovod() -> Any:
    """Return Horovod where it is the group; None with torch.distributed."""
    if dist.is_initialized():
        return None
    if "horovod" not in sys.modules:
        raise RuntimeError(
            "The backend has made no process group: torch.distributed is not initialized after its "
            "setup()."
        )
    import horovod.torch as hvd

    return hvd


def rank() -> int:
    """Return this worker's rank in the group."""
    hvd = _horovod()
    return dist.get_rank() if hvd is None else int(hvd.rank())


def size() -> int:
    """Return how many workers the group has."""
    hvd = _horovod()
    return dist.get_world_size() if hvd is None else int(hvd.size())


def minimum(value: int, device: torch.device) -> int:
    """Return the smallest `value` of all ranks."""
    hvd = _horovod()
    held = torch.tensor([value], dtype=torch.int64, device=device)
    if hvd is not None:
        return int(hvd.allgather(held, name="raysgd.minimum").min())
    dist.all_reduce(held, op=dist.ReduceOp.MIN)
    return int(held.item())


def mean(value: float, device: torch.device) -> float:
    """Return the mean of a number over all ranks."""
    hvd = _horovod()
    held = torch.tensor([value], dtype=torch.float64, device=device)
    if hvd is not None:
        return float(hvd.allgather(held, name="raysgd.mean").mean())
    dist.all_reduce(held)
    return held.item() / size()


def ranks_with(said: bool, device: torch.device) -> list[int]:
    """Return the ranks that said True."""
    hvd = _horovod()
    held = torch.zeros(size(), dtype=torch.int64, device=device)
    held[rank()] = int(said)
    if hvd is not None:
        held = hvd.allgather(held.view(1, -1), name="raysgd.ranks").sum(dim=0)
    else:
        dist.all_reduce(held)
    return [each for each, number in enumerate(held.tolist()) if number]


def fewest_receivers(wanting: Sequence[int], device: torch.device) -> Sequence[int] | None:
    """Return to which ranks to send something that these want; None for all, as one broadcast.

    A broadcast over W ranks takes log2(W) rounds; to a single rank one is enough, and the others
    need not take part.
    """
    if _horovod() is not None or device.type != "cpu":
        return None
    few = len(wanting) < size() - 1 and len(wanting) <= math.log2(size())
    return wanting if few else None


def broadcast(tensor: torch.Tensor, source: int, to: Sequence[int] | None = None) -> None:
    """Overwrite `tensor`, which must be contiguous, with that of rank `source`.

    Args:
        tensor: of the same size on all ranks.
        source: the rank that has it.
        to: the only ranks that get it, one after the other; the rest may call this or not.
    """
    hvd = _horovod()
    content = tensor.view(-1).view(torch.uint8)  # gloo, NCCL and Horovod each lack some types
    if hvd is not None:
        hvd.broadcast_(content, root_rank=source, name="raysgd.broadcast")
    elif to is None:
        dist.broadcast(content, src=source)
    elif rank() == source:
        for each in to:
            dist.send(content, each)
    elif rank() in to:
        dist.recv(content, source)


def broadcast_object(thing: Any, source: int, to: Sequence[int] | None = None) -> Any:
    """Return what rank `source` gave, on every rank or those in `to`; it travels as a pickle."""
    hvd = _horovod()
    if hvd is not None:
        return hvd.broadcast_object(thing, root_rank=source, name="raysgd.object")
    box = [thing]
    if to is None:
        dist.broadcast_object_list(box, src=source)
    elif rank() == source:
        for each in to:
            dist.send_object_list(box, each)
    elif rank() in to:
        dist.recv_object_list(box, source)
    return box[0]


# ---- states


def broadcast_tensors(
    tensors: Sequence[torch.Tensor], source: int, to: Sequence[int] | None = None
) -> None:
    """Overwrite `tensors` with those of rank `source`, those of one type and device together.

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
            if size >= _MESSAGE_BYTES or stop == len(members):
                _broadcast_flat(members[start:stop], source, to)
                start, size = stop, 0


def _broadcast_flat(tensors: list[torch.Tensor], source: int, to: Sequence[int] | None) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    broadcast(flat, source, to)
    if rank() != source:
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


class _Slot:
    """Stands for a tensor in the structure that travels."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.on_cpu = tensor.device.type == "cpu"


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
    tensors: list[torch.Tensor] = []

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return _Slot(leaf)

    def make(leaf: Any) -> Any:
        if not isinstance(leaf, _Slot):
            return leaf
        target = torch.device("cpu") if leaf.on_cpu else device
        tensors.append(torch.empty(leaf.shape, dtype=leaf.dtype, device=target))
        return tensors[-1]

    if rank() == source:
        state = make_state()
        broadcast_object(map_leaves(state, take), source, to)
    else:
        state = map_leaves(broadcast_object(None, source, to), make)
    broadcast_tensors(tensors, source, to)
    return state


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
