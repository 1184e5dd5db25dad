"""What workers tell each other beside gradients, by torch.distributed or by Horovod."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["broadcast", "broadcast_object", "minimum", "rank"]


def _horovod() -> Any:
    """Return Horovod where it is the group; None with torch.distributed."""
    if dist.is_initialized():
        return None
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


def broadcast(tensor: torch.Tensor, source: int) -> None:
    """Overwrite `tensor`, which must be contiguous, with that of rank `source`."""
    hvd = _horovod()
    content = tensor.view(-1).view(torch.uint8)  # gloo, NCCL and Horovod each lack some types
    if hvd is None:
        dist.broadcast(content, src=source)
    else:
        hvd.broadcast_(content, root_rank=source, name="raysgd.broadcast")


def broadcast_object(thing: Any, source: int) -> Any:
    """Return what rank `source` gave, on every rank; it travels as a pickle."""
    hvd = _horovod()
    if hvd is not None:
        return hvd.broadcast_object(thing, root_rank=source, name="raysgd.object")
    box = [thing]
    dist.broadcast_object_list(box, src=source)
    return box[0]
