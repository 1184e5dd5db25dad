"""Collectives other than gradient averaging, with torch.distributed or Horovod."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from raysgd._internal.nested import map_leaves

_MESSAGE_BYTES = 64 * 2**20
"""Size in bytes at which a combined message of tensors is sent."""


def _horovod() -> Any:
    """Return the module of Horovod, or None if workers communicate with torch.distributed."""
    if dist.is_initialized():
        return None
    if "horovod" not in sys.modules:
        raise RuntimeError(
            "The setup() of the backend did not initialize torch.distributed. It must create a "
            "process group."
        )
    import horovod.torch as hvd

    return hvd


def rank() -> int:
    hvd = _horovod()
    return dist.get_rank() if hvd is None else int(hvd.rank())


def minimum(value: int, device: torch.device) -> int:
    hvd = _horovod()
    held = torch.tensor([value], dtype=torch.int64, device=device)
    if hvd is not None:
        return int(hvd.allgather(held, name="raysgd.minimum").min())
    dist.all_reduce(held, op=dist.ReduceOp.MIN)
    return int(held.item())


def mean(value: float, device: torch.device) -> float:
    hvd = _horovod()
    held = torch.tensor([value], dtype=torch.float64, device=device)
    if hvd is not None:
        return float(hvd.allgather(held, name="raysgd.mean").mean())
    dist.all_reduce(held)
    return held.item() / dist.get_world_size()


def broadcast(tensor: torch.Tensor, source: int) -> None:
    """Overwrite a contiguous tensor with the tensor of rank `source`."""
    hvd = _horovod()
    content = tensor.view(-1).view(torch.uint8)  # gloo, NCCL and Horovod each lack some dtypes
    if hvd is None:
        dist.broadcast(content, src=source)
    else:
        hvd.broadcast_(content, root_rank=source, name="raysgd.broadcast")


def broadcast_object(thing: Any, source: int) -> Any:
    """Send the pickled `thing` of rank `source` to every rank. Return it."""
    hvd = _horovod()
    if hvd is not None:
        return hvd.broadcast_object(thing, root_rank=source, name="raysgd.object")
    box = [thing]
    dist.broadcast_object_list(box, src=source)
    return box[0]


# ---- states


def broadcast_tensors(tensors: Sequence[torch.Tensor], source: int) -> None:
    """Overwrite `tensors` with the tensors of rank `source`, grouped by dtype and device."""
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for members in groups.values():
        start, size = 0, 0
        for stop, tensor in enumerate(members, start=1):
            size += tensor.numel() * tensor.element_size()
            if size >= _MESSAGE_BYTES or stop == len(members):
                _broadcast_flat(members[start:stop], source)
                start, size = stop, 0


def _broadcast_flat(tensors: list[torch.Tensor], source: int) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    broadcast(flat, source)
    if rank() != source:
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


class _Slot(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool


def broadcast_state(make_state: Callable[[], Any], source: int, device: torch.device) -> Any:
    """Return rank `source`'s state on every rank: nested dicts, lists, and tuples with tensors.

    Only rank `source` calls `make_state`. Tensors from a CPU arrive on the CPU, and other tensors
    on `device`.
    """
    tensors: list[torch.Tensor] = []

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return _Slot(tuple(leaf.shape), leaf.dtype, leaf.device.type == "cpu")

    def make(leaf: Any) -> Any:
        if not isinstance(leaf, _Slot):
            return leaf
        target = torch.device("cpu") if leaf.on_cpu else device
        tensors.append(torch.empty(leaf.shape, dtype=leaf.dtype, device=target))
        return tensors[-1]

    if rank() == source:
        state = make_state()
        broadcast_object(map_leaves(state, take), source)
    else:
        state = map_leaves(broadcast_object(None, source), make)
    broadcast_tensors(tensors, source)
    return state


def fingerprint(state: Any) -> bytes:
    """Return a digest of nested dicts, lists, and tuples with tensors, to compare ranks.

    A state that cannot be pickled gets a random digest.
    """

    def summary(leaf: Any) -> Any:
        return _bits(leaf) if isinstance(leaf, torch.Tensor) else leaf

    with io.BytesIO() as file:
        pickler = pickle.Pickler(file)
        pickler.fast = True  # with a memo, equal strings and shared strings would differ
        try:
            pickler.dump(map_leaves(state, summary))
        except Exception:  # probably a reference cycle: a scheduler that holds its own method
            return os.urandom(32)
        return hashlib.sha256(file.getvalue()).digest()


def _bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the sum and the hash of the 64-bit words of a tensor, computed on its device."""
    content = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    if content.storage_offset() % 8:
        content = content.clone()  # words must be aligned
    num_whole = content.numel() // 8 * 8
    words, rest = content[:num_whole].view(torch.int64), content[num_whole:].tolist()
    bits = (int(words.sum()), int(torch.hash_tensor(words).view(torch.int64))) if num_whole else ()
    return (str(tensor.dtype), tuple(tensor.shape), *bits, *rest)
