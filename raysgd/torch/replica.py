"""Models that are the same on every worker: DistributedDataParallel, and state from one rank."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from raysgd.torch import collectives
from raysgd.trees import map_leaves

__all__ = [
    "ReplicatedCriterion",
    "ReplicatedModel",
    "agree_on_minimum",
    "broadcast_state",
    "broadcast_tensors",
    "fingerprint",
    "no_forward_sync",
    "only_running_statistics",
    "rebuild",
    "replicated",
    "unwrap",
    "without_buffers",
    "wrapping_arguments",
]


class ReplicatedModel(DistributedDataParallel):
    """DistributedDataParallel whose forward communicates only where gradients follow.

    Under ``no_grad`` it calls the module itself: DistributedDataParallel would broadcast the
    buffers there as well, and block for good when workers validate uneven numbers of batches.
    """

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if torch.is_grad_enabled():
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        return self.module(*inputs, **kwargs)


class ReplicatedCriterion(ReplicatedModel):
    """A loss that learns, with the attributes of the loss."""

    def __getattr__(self, name: str) -> Any:
        """Give access to what the loss has, as where there is one worker."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not set yet
                raise
            return getattr(self.module, name)


def only_running_statistics(model: torch.nn.Module) -> bool:
    """Whether all buffers of `model` are running statistics of batch normalization.

    Training does not read these, so that they need not be the same on all ranks at each step:
    rank 0's are the same with and without, and all get them when a call ends. Not broadcasting
    them in each forward pass saves time.
    """
    return all(
        isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm)
        for module in model.modules()
        if any(buffer is not None for buffer in module._buffers.values())
    )


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside of DistributedDataParallel, or `model` itself."""
    module: torch.nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return module


def without_buffers(model: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return what a state dict of `model` has beside buffers."""
    buffers = {name for name, _ in unwrap(model).named_buffers()}
    return {name: value for name, value in state.items() if name not in buffers}


def replicated(model: torch.nn.Module) -> bool:
    """Whether `model` is held equal on all workers by DistributedDataParallel."""
    return isinstance(model, DistributedDataParallel)


def rebuild(model: DistributedDataParallel, arguments: dict[str, Any]) -> None:
    """Build DistributedDataParallel anew, in place, for the process group that exists now.

    The object stays the same, so that references to it in user code stay good. Everything in
    it is new, on every rank: a survivor's bucket order follows the order in which gradients
    came in its first step and a newcomer's does not, so that a reducer that was kept would
    add up the wrong parameters without an error.
    """
    module, training = model.module, model.training
    DistributedDataParallel.__init__(model, module, **{**arguments, "init_sync": False})
    model.training = training


def wrapping_arguments(model: DistributedDataParallel) -> dict[str, Any]:
    """Return the arguments with which a model that user code wrapped can be built anew."""
    return {
        "device_ids": model.device_ids,
        "bucket_cap_mb": model.bucket_bytes_cap / 2**20,
        "find_unused_parameters": model.find_unused_parameters,
        "gradient_as_bucket_view": model.gradient_as_bucket_view,
        "static_graph": model.static_graph,
        "forward_sync_buffers": model.forward_sync_buffers,
    }


def agree_on_minimum(value: int, device: torch.device) -> int:
    """Return the smallest `value` of all ranks. Every rank must call it."""
    return collectives.minimum(value, device)


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

    Of each tensor it has the sum and the exclusive or of its bits, in words of 64. That is blind to
    words that change places, which ranks do not do that come apart by training, and costs no more
    than to read the tensor, on its device. What cannot be compared is equal to nothing.
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
        place = torch.device("cpu") if leaf.on_cpu else device
        tensors.append(torch.empty(leaf.shape, dtype=leaf.dtype, device=place))
        return tensors[-1]

    return map_leaves(tree, make)


@contextlib.contextmanager
def no_forward_sync(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Keep models that user code wrapped from broadcasting buffers in their forward pass."""
    wrapped = [m for m in models if isinstance(m, DistributedDataParallel)]
    held = [model.require_forward_param_sync for model in wrapped]
    for model in wrapped:
        model.require_forward_param_sync = False
    try:
        yield
    finally:
        for model, value in zip(wrapped, held, strict=True):
            model.require_forward_param_sync = value
