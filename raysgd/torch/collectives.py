"""Collectives with torch.distributed or Horovod. Horovod averages gradients itself."""

import functools
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives, distributed_c10d

from raysgd._internal.collectives import Collectives
from raysgd._internal.nested import map_leaves
from raysgd.torch.tensors import backward_pass_number

_MESSAGE_BYTES = 4 * 2**20
"""Size in bytes at which a combined message of tensors is sent. Larger tensors are sent in chunks.

Tensors are copied to combine them. With 64 MiB, this takes longer than the transfer, because the
memory of each message comes from the operating system."""


class TorchCollectives(Collectives):
    """Collectives with torch.distributed or Horovod, for the group of the current generation.

    A strategy calls torch.distributed directly for collectives that only it needs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def all_reduce_min(self, *values: int) -> list[int]:
        numbers = torch.tensor(values, dtype=torch.int64, device=self._device)
        return [int(number) for number in self.all_reduce_min_tensor(numbers).tolist()]

    def all_reduce_min_tensor(self, values: torch.Tensor) -> torch.Tensor:
        """Return the minimum of all ranks for each element of a vector, which this may change."""
        if (hvd := _horovod()) is not None:
            gathered: torch.Tensor = hvd.allgather(values, name="raysgd.minimum")
            return gathered.view(-1, len(values)).amin(0)
        dist.all_reduce(values, op=dist.ReduceOp.MIN)
        return values

    def all_reduce_sum(self, value: float) -> float:
        tensor = torch.tensor([value], dtype=torch.float64, device=self._device)
        if (hvd := _horovod()) is not None:
            return float(hvd.allgather(tensor, name="raysgd.total").sum())
        dist.all_reduce(tensor)
        return float(tensor.item())

    def broadcast(self, make: Callable[[], Any], src: int, wanted: bool = True) -> Any:
        """Return the state of `src` on every rank: nested dicts, lists, and tuples with tensors.

        Only `src` calls `make`. Tensors from a CPU arrive on the CPU, and other tensors on this
        worker's device. If the state is not `wanted`, it arrives with meta tensors, which need no
        memory.
        """
        tensors: list[tuple[torch.device, torch.Tensor]] = []

        def take(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
                return leaf
            tensors.append((leaf.device, leaf))
            return _TensorSpec(tuple(leaf.shape), leaf.dtype, leaf.device.type == "cpu")

        def allocate(leaf: Any) -> Any:
            if not isinstance(leaf, _TensorSpec):
                return leaf
            target = torch.device("cpu") if leaf.on_cpu else self._device
            new = torch.empty(leaf.shape, dtype=leaf.dtype, device=target if wanted else "meta")
            tensors.append((target, new))
            return new

        if _rank() == src:
            state = make()
            _broadcast_object(map_leaves(state, take), src)
        else:
            state = map_leaves(_broadcast_object(None, src), allocate)
        _broadcast_all(tensors, src)
        return state

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor], src: int) -> None:
        """Overwrite `tensors` with the tensors of rank `src`, grouped by dtype and device."""
        _broadcast_all([(tensor.device, tensor) for tensor in tensors], src)


class _TensorSpec(NamedTuple):
    """What a tensor of a broadcast state is before it arrives."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool


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


def _rank() -> int:
    hvd = _horovod()
    return dist.get_rank() if hvd is None else int(hvd.rank())


def _broadcast_object(value: Any, src: int) -> Any:
    """Send the pickled `value` of rank `src` to every rank. Return it."""
    if (hvd := _horovod()) is not None:
        return hvd.broadcast_object(value, root_rank=src, name="raysgd.object")
    box = [value]
    dist.broadcast_object_list(box, src=src)
    return box[0]


def _broadcast_all(tensors: Sequence[tuple[torch.device, torch.Tensor]], src: int) -> None:
    """Broadcast tensors of the given devices. What arrives for a meta tensor is discarded."""
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for device, tensor in tensors:
        groups.setdefault((tensor.dtype, device), []).append(tensor.detach())
    for (_, device), members in groups.items():
        for indices in split_into_messages(members, _MESSAGE_BYTES):
            _broadcast_flat([members[index] for index in indices], device, src)


def split_into_messages(tensors: Sequence[torch.Tensor], max_bytes: int) -> list[list[int]]:
    """Divide consecutive tensors of one dtype into messages. A larger tensor is a message."""
    messages: list[list[int]] = []
    size = 0
    for index, tensor in enumerate(tensors):
        size += tensor.nbytes
        if not messages or size > max_bytes or tensor.dtype != tensors[index - 1].dtype:
            messages.append([])
            size = tensor.nbytes
        messages[-1].append(index)
    return messages


def _broadcast_flat(tensors: list[torch.Tensor], device: torch.device, src: int) -> None:
    """Broadcast tensors in chunks. These arrive in the memory of a contiguous tensor alone."""
    if len(tensors) > 1 or tensors[0].numel() == 1:  # whose stride may be any number
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    else:
        flat = tensors[0].resolve_conj().resolve_neg().contiguous().view(-1)
    hvd = _horovod()
    for chunk in flat.split(_MESSAGE_BYTES // flat.element_size()):
        received = torch.empty_like(chunk, device=device) if chunk.is_meta else chunk
        content = received.view(-1).view(torch.uint8)  # gloo, NCCL and Horovod each lack dtypes
        if hvd is None:
            dist.broadcast(content, src=src)
        else:
            hvd.broadcast_(content, root_rank=src, name="raysgd.broadcast")
    if _rank() != src and flat.data_ptr() != tensors[0].data_ptr():
        for tensor, new in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(new.view_as(tensor))


def average_gradients(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Average the gradients of the same parameters on every rank. Every rank must call this.

    A gradient that other ranks lack counts as 0 there.
    """
    kinds = [0 if p.grad is None else 1 + p.grad.is_sparse for p in parameters]
    max_kinds = torch.tensor(kinds, dtype=torch.int64, device=parameters[0].device)
    dist.all_reduce(max_kinds, op=dist.ReduceOp.MAX)
    groups: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    for number, (parameter, kind) in enumerate(zip(parameters, max_kinds.tolist(), strict=True)):
        if kind and parameter.grad is None:
            zeros = torch.zeros_like(parameter)
            parameter.grad = zeros if kind == 1 else zeros.to_sparse(1)
        if (gradient := parameter.grad) is not None:
            if gradient.is_sparse:
                parameter.grad = gradient = gradient.coalesce()
            alone = number if gradient.is_sparse or gradient.nbytes >= _MESSAGE_BYTES else None
            groups.setdefault((gradient.dtype, alone), []).append(gradient)
    for gradients in groups.values():
        flat = gradients[0]
        if not flat.is_sparse:
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        flat.div_(dist.get_world_size())  # first, so that sums do not overflow
        dist.all_reduce(flat)
        if not flat.is_sparse:
            means = flat.split([gradient.numel() for gradient in gradients])
            for gradient, mean in zip(gradients, means, strict=True):
                gradient.copy_(mean.view_as(gradient))


# ---- collectives of user code

_PREFIXES = ("all", "broadcast", "gather", "irecv", "isend", "reduce", "scatter")
_FIRST_CALLS = [
    (module, name, getattr(module, name))
    for module, name in (
        (distributed_c10d, "_rank_not_in_group"),
        (_functional_collectives, "_resolve_group"),
        (_functional_collectives, "_resolve_group_name"),  # before PyTorch 2.13
    )
    if hasattr(module, name)
]
"""What the collectives of all groups and backends call first. PyTorch has no public hook."""


def watch_user_collectives(report: Callable[[str], None], restore: Callable[..., Any]) -> None:
    """Call a method with the name of each collective or message of user code, before it runs.

    DistributedDataParallel and modules of PyTorch do not count. `restore` gets what ends the watch.
    """

    def reporting(function: Any, *arguments: Any, **keywords: Any) -> Any:
        frame: Any = sys._getframe(1)
        name = frame.f_code.co_name.lstrip("_")
        if name.startswith(_PREFIXES) and backward_pass_number() == -1:
            while re.match(r"torch\.(?!nn\.)", caller := frame.f_globals.get("__name__", "")):
                frame = frame.f_back
            if caller.partition(".")[0] not in ("torch", "raysgd"):
                report(name)
        return function(*arguments, **keywords)

    for module, name, function in _FIRST_CALLS:
        restore(setattr, module, name, function)
        setattr(module, name, functools.partial(reporting, function))
