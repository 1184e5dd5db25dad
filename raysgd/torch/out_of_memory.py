"""When memory runs out: which errors say so, what is freed, and batches in parts."""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch

from raysgd.data.partition import even_part

__all__ = [
    "batch_parts",
    "concatenated",
    "free_memory",
    "in_own_containers",
    "num_rows",
    "ran_out_of_memory",
]

_SIGNS = ("DefaultCPUAllocator: ", "CUDA error: out of memory", "_ALLOC_FAILED")
"""Of errors that torch has no class for: of its allocator for CPUs, and what passes by that for
GPUs."""

_MOST_ITEMS = 64
"""Of a list or tuple in a batch that are looked into at each step: others have one per sample."""


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that there is no memory left, of a GPU or of this process."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    inner = getattr(error, "inner_exception", None)  # of errors of torch's compiler
    if isinstance(inner, BaseException):
        return ran_out_of_memory(inner)
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def free_memory() -> None:
    """Free tensors that frames of a failed step hold, and GPU memory that torch caches."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def num_rows(batch: Any, samples: float = 0) -> int:
    """Return the first dimension that all tensors of a batch have.

    Args:
        batch: the batch.
        samples: of the batch; 0: unknown.

    Raises:
        TypeError: if there is none, so that it cannot be split; it says why.
    """
    sizes: set[int] = set()

    def measure(tensor: Any) -> Any:
        if not tensor.shape:
            raise TypeError("it holds a tensor without dimensions")
        if (layout := getattr(tensor, "layout", torch.strided)) is not torch.strided:
            raise TypeError(f"it holds a tensor of the layout {layout}")
        sizes.add(len(tensor))
        return tensor

    _mapped(batch, measure)
    if len(sizes) != 1:
        shown = " and ".join(map(str, sorted(sizes))) or "none"
        raise TypeError(f"its tensors do not share a first dimension ({shown})")
    rows = sizes.pop()
    if samples not in (0, rows) and _has_one_each(batch, samples):
        raise TypeError(f"it has a list of {samples:g} tensors, one for each sample")
    return rows


def _has_one_each(batch: Any, samples: float) -> bool:
    """Whether lists or tuples in a batch hold its samples, so that no dimension is of samples."""
    if isinstance(batch, dict):
        batch = list(batch.values())
    elif type(batch) not in (tuple, list):
        return False
    elif len(batch) == samples and all(isinstance(item, torch.Tensor) for item in batch):
        return True
    return any(_has_one_each(item, samples) for item in batch)


def batch_parts(batch: Any, number: int) -> list[Any]:
    """Return a batch as `number` parts; where it has fewer samples, some of them twice."""
    rows = num_rows(batch)

    def part(index: int) -> Any:
        start, stop = even_part(rows, number, index)
        return _mapped(batch, lambda tensor: tensor[start:stop])

    return [part(index) for index in range(number)]


def concatenated(parts: Sequence[Any]) -> Any:
    """Join tensors, or arrays, along their first dimension."""
    is_tensor = isinstance(parts[0], torch.Tensor)
    return torch.cat(list(parts)) if is_tensor else np.concatenate(parts)


def in_own_containers(batch: Any) -> Any:
    """Return a batch in containers of its own, with the same tensors, whatever else it has."""
    try:
        return _mapped(batch, lambda tensor: tensor, lambda other: other, most=_MOST_ITEMS)
    except Exception:  # classes of the user's may refuse
        return batch


def _refuse(held: Any) -> Any:
    raise TypeError(f"it holds a {type(held).__name__}, which is no tensor")


def _mapped(
    batch: Any,
    function: Callable[[Any], Any],
    otherwise: Callable[[Any], Any] = _refuse,
    most: float = math.inf,
) -> Any:
    """Return a batch with a function applied to its tensors, whatever they are in.

    Lists and tuples of more than `most` items have the items that they had.
    """

    def mapped(item: Any) -> Any:
        return _mapped(item, function, otherwise, most)

    if isinstance(batch, torch.Tensor | np.ndarray):
        return function(batch)
    if batch is None:
        return None
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(mapped, batch))
    if type(batch) in (tuple, list):
        return type(batch)(map(mapped, batch)) if len(batch) <= most else batch[:]
    # of another mapping a copy may share what the first holds its items in
    if isinstance(batch, dict) or (
        isinstance(batch, MutableMapping) and hasattr(batch, "__copy__")
    ):
        made = copy.copy(batch)
        for key, item in batch.items():
            made[key] = mapped(item)
        return made
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = {field.name for field in dataclasses.fields(batch)}
        if set(getattr(batch, "__dict__", ())) <= names:
            like = copy.copy(batch)  # not replace(), whose __post_init__ would change it again
            for name in names:
                object.__setattr__(like, name, mapped(getattr(batch, name)))
            return like
    return otherwise(batch)
