"""What workers tell each other beside gradients, by torch.distributed or by Horovod."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "broadcast",
    "broadcast_object",
    "fewest_receivers",
    "minimum",
    "rank",
    "ranks_with",
]


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


def minimum(value: int, device: torch.device) -> int:
    """Return the smallest `value` of all ranks."""
    hvd = _horovod()
    held = torch.tensor([value], dtype=torch.int64, device=device)
    if hvd is not None:
        return int(hvd.allgather(held, name="raysgd.minimum").min())
    dist.all_reduce(held, op=dist.ReduceOp.MIN)
    return int(held.item())


def ranks_with(said: bool, device: torch.device) -> list[int]:
    """Return the ranks that said True."""
    hvd = _horovod()
    size = dist.get_world_size() if hvd is None else hvd.size()
    held = torch.zeros(size, dtype=torch.int64, device=device)
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
    size = dist.get_world_size()
    few = len(wanting) < size - 1 and len(wanting) <= math.log2(size)
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
