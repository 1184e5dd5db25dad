"""Copies of tensors and models, operations on many tensors, and digests of their bits."""

import copy
import copyreg
import functools
import hashlib
import io
import itertools
import operator
import os
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import optim
from torch.autograd import Variable
from torch.nn.utils import parametrize

from raysgd._internal.nested import map_leaves, named_values, try_copy
from raysgd.cluster.serialization import find_unpicklable
from raysgd.loop.differences import cpu_model

ELEMENTWISE = (
    optim.ASGD,
    optim.SGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.Adamax,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
)
"""Optimizers that update each element independently of the others."""
_FACTOR = 4354685564936845354  # twice an odd number of 63 bits without a pattern
_WORDS = {"cpu": 2**16, "cuda": 2**21}
"""Number of 64-bit words that are multiplied together: as many as the cache of a CPU holds."""


def copy_leaf(leaf: Any, on_host: bool = False, may_alias: bool = False) -> Any:
    """Return a copy of a leaf of a state. Tensors stay on their device, unless `on_host`.

    If it `may_alias`, it shares the memory of CPU tensors, and other objects, with the leaf. A copy
    to the host waits for the GPU, and needs no memory there for contiguous tensors.
    """
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().to("cpu" if on_host else leaf.device, copy=not may_alias)
    # Copying a scheduler inside another one's state, or its method, would copy the optimizer.
    is_data = not (callable(leaf) or hasattr(leaf, "optimizer"))
    return try_copy(leaf) if is_data and not may_alias else leaf


def copy_to_cpu(model: torch.nn.Module) -> torch.nn.Module:
    """Return a CPU copy that can be pickled, without a temporary copy on the model's device."""
    kept = nested_tensors([vars(module) for module in model.modules()], set())
    tensors = itertools.chain(model.parameters(), model.buffers(), kept)
    memo = {id(tensor): _cpu_copy(tensor) for tensor in tensors}
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:
        path, _ = find_unpicklable(model)  # for example, to a hook that refers to the operator
        raise TypeError(
            f"The model, a {type(model).__name__}, cannot be copied: {error!r} in model{path}. Use "
            'its weights: trainer.state_dict()["models"].'
        ) from error
    for module in copied.modules():
        if parametrize.is_parametrized(module):
            copyreg.pickle(type(module), _reduce_parametrized)
    return copied


def nested_tensors(tree: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Iterate over tensors in dicts, lists, and tuples, each once. Forward passes may keep tensors.

    Other containers may read a file, lack values, or have many paths to each object.
    """
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict | list | tuple) and id(tree) not in seen:
        seen.add(id(tree))
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from nested_tensors(each, seen)


def _reduce_parametrized(module: Any) -> tuple[Any, ...]:
    """Reduce a parametrized module, whose generated class cannot be pickled."""
    kind: Any = parametrize.type_before_parametrizations(module)
    return kind.__new__, (kind,), kind.__getstate__(module), None, None, _restore_parametrized


def _restore_parametrized(module: Any, state: Any) -> None:
    """Restore a module's state, and the class that PyTorch generates for its parametrizations."""
    module.__setstate__(state)
    parametrize._inject_new_class(module)
    for name in module.parametrizations:
        parametrize._inject_property(module, name)


def _cpu_copy(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().cpu().clone()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
    return copied


def leaves_in(tree: Any) -> Iterator[Any]:
    """Iterate over the values in dicts, data classes, lists, and tuples."""
    named = None if isinstance(tree, torch.Tensor) else named_values(tree)
    if named is not None or isinstance(tree, list | tuple):
        for each in tree if named is None else named.values():
            yield from leaves_in(each)
    else:
        yield tree


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_in(tree) if isinstance(leaf, torch.Tensor)]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the content of a tensor as a vector of bytes, without a copy if possible."""
    # The memory lacks a lazy conjugation or negation.
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A contiguous tensor with a single element can have any stride.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


# ---- helpers that PyTorch offers only under private names

backward_pass_number: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the number of the backward pass that calls this, or -1. Public hooks only get tensors."""
call_after_backward: Callable[[Callable[[], Any]], None] = Variable._execution_engine.queue_callback
"""Calls a function at the end of the current backward pass. Public hooks run within it."""
version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""Returns how often a tensor was changed in place, which no public attribute tells."""


def copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair into the first."""
    groups = defaultdict(list)
    for pair in pairs:
        groups[pair[0].dtype, pair[1].dtype, pair[0].device].append(pair)
    for group in groups.values():
        into, content = map(list, zip(*group, strict=True))
        torch._foreach_copy_(into, content)  # one kernel on a GPU


@torch.no_grad()
def copies_of(
    tensors: Iterable[torch.Tensor | None], memory: Iterable[torch.Tensor] = ()
) -> list[Any]:
    """Return copies of tensors, in `memory` where it fits. On a GPU, one kernel copies many."""
    rows = zip(tensors, itertools.chain(memory, itertools.repeat(None)), strict=False)
    pairs: list[tuple[Any, Any]] = [(t if t is None else _memory_for(t, old), t) for t, old in rows]
    copy_all(pair for pair in pairs if pair[0] is not None)
    return [copied for copied, _ in pairs]


def _memory_for(tensor: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
    if old is None or tensor.layout is not torch.strided or old.shape != tensor.shape:
        return torch.empty_like(tensor)
    is_alike = (old.dtype, old.device) == (tensor.dtype, tensor.device)
    return old if is_alike else torch.empty_like(tensor)


def total_norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the same as ``torch.nn.utils.get_total_norm``, with 50 fewer calls on one device."""
    if len({each.device for each in tensors}) != 1:
        return torch.nn.utils.get_total_norm(tensors)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))
    return norm.detach()


def multiply_all(tensors: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply tensors in place. On a GPU, one kernel multiplies many tensors."""
    if tensors := list(tensors):
        torch._foreach_mul_(tensors, factor)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def inner_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that an optimizer wraps, as sharpness-aware minimization does."""
    values = vars(optimizer).values()
    listed = (each for value in values if isinstance(value, list | tuple) for each in value)
    named = (each for value in values if isinstance(value, dict) for each in value.values())
    return [each for each in (*values, *listed, *named) if isinstance(each, torch.optim.Optimizer)]


class TensorVersions:
    """The versions of the tensors that `read` returns, to find later changes.

    This keeps no tensor alive, so a new one may have the ID of a lost one. PyTorch does not count
    changes through ``data``.
    """

    def __init__(self, read: Callable[[], Iterable[torch.Tensor | None]]) -> None:
        self._read = read
        self._seen = self._read_versions()

    def _read_versions(self) -> list[tuple[int, int]]:
        tensors = [tensor for tensor in self._read() if tensor is not None]
        return list(zip(map(id, tensors), map(version_of, tensors), strict=True))

    def find_changed_ids(self) -> set[int]:
        """Return the IDs of the tensors that have changed, are missing, or are new.

        If only their order has changed, return those of the tensors at another place.
        """
        seen, now = self._seen, self._read_versions()
        if seen == now:
            return set()
        pairs = {*seen} ^ {*now} or {b for a, b in zip(seen, now, strict=False) if a != b}
        return {each for each, _ in pairs}


def describe_platform(device: torch.device) -> str:
    """Return what determines the rounding of a computation, apart from data and seeds."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{cpu_model()} ({torch.backends.cpu.get_cpu_capability()})"
    return f"{name} with PyTorch {torch.__version__} and {torch.get_num_threads()} threads"


def can_copy(saved: Any, value: torch.Tensor) -> bool:
    """Return whether `saved` is a tensor that can be copied to `value` if their shapes agree."""
    return (
        isinstance(saved, torch.Tensor)
        and saved.layout == value.layout
        and not saved.is_meta
        and not saved.is_quantized
    )


# ---- digests, computed on the device: any change of bits changes 64 bits


def tensor_digest(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return a 64-bit digest of the bits of tensors and their positions, as a tensor on `device`.

    The tensors must be on `device`. The digest of one tensor is the same on all devices. Temporary
    memory is limited to 64 MiB, unless a tensor is not contiguous. The digest of a GPU is ready
    when its stream has reached this point.
    """
    total, position = torch.zeros((), dtype=torch.int64, device=device), 0
    num_words = _WORDS.get(device.type, _WORDS["cuda"])
    scratch = torch.empty(num_words, dtype=torch.int64, device=device)
    for words in _chunks(tensors, 8 * num_words):
        factors = _factors(num_words, device)[: words.numel()]
        # The products lose high bits, so add the high half to the low half first.
        high = torch.bitwise_right_shift(words, 32, out=scratch[: words.numel()])
        mixed = high.bitwise_xor_(words)
        total = total + mixed.sum() * position * _FACTOR
        total += mixed.dot(factors) if device.type == "cpu" else mixed.mul_(factors).sum()
        position += words.numel()
    return total + position


@functools.cache
def _factors(size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(size, dtype=torch.int64, device=device) * _FACTOR + 1


def _chunks(tensors: Iterable[torch.Tensor], size: int) -> Iterator[torch.Tensor]:
    """Yield the content of tensors as 64-bit words, in chunks of at most `size` bytes.

    Combine small tensors, because each operation on a GPU takes microseconds.
    """
    sections: list[torch.Tensor] = []
    total = 0
    for tensor in filter(is_readable, tensors):
        content = as_bytes(tensor)
        num_bytes = content.numel()
        if num_bytes >= size and content.storage_offset() % 8 == 0:
            whole, num_bytes = num_bytes // 8 * 8, num_bytes % 8
            yield from content[:whole].view(torch.int64).split(size // 8)
            content = content[whole:]
        for section in [content] if num_bytes <= size else content.split(size):
            if total + section.numel() > size:
                yield _concatenate(sections, total)
                sections, total = [], 0
            sections.append(section)
            total += section.numel()
    if sections:
        yield _concatenate(sections, total)


def is_readable(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a tensor can be read, unlike that of a sparse tensor."""
    if torch.nn.parameter.is_lazy(tensor) or tensor.layout is not torch.strided:
        return False
    is_plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return is_plain and not (tensor.is_meta or tensor.is_quantized)


def _concatenate(sections: list[torch.Tensor], num_bytes: int) -> torch.Tensor:
    return torch.cat([*sections, sections[0].new_zeros(-num_bytes % 8)]).view(torch.int64)


def state_digest(state: Any) -> bytes:
    """Return a digest of nested dicts, lists, and tuples with tensors, to compare ranks.

    A state that cannot be pickled gets a random digest.
    """
    tensors: dict[torch.device, list[torch.Tensor]] = {}

    def summary(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not is_readable(leaf):
            return leaf
        tensors.setdefault(leaf.device, []).append(leaf)
        return str(leaf.dtype), tuple(leaf.shape)

    with io.BytesIO() as file:
        pickler = pickle.Pickler(file)
        pickler.fast = True  # with a memo, equal strings and shared strings would differ
        try:
            pickler.dump(map_leaves(state, summary))
        except Exception:  # probably a reference cycle: a scheduler that holds its own method
            return os.urandom(32)
        pickler.dump([int(tensor_digest(members, device)) for device, members in tensors.items()])
        return hashlib.sha256(file.getvalue()).digest()
