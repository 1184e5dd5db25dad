"""Recovery from exhausted memory: detect errors, free memory, and split batches."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
from collections import UserDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from raysgd.data.partition import part_of

_SIGNS = ("DefaultCPUAllocator: ", "CUDA error: out of memory", "_ALLOC_FAILED")
"""Messages that identify errors without their own class."""


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception reports that GPU or process memory is exhausted."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    inner = getattr(error, "inner_exception", None)  # torch.compile wraps the original error
    if isinstance(inner, BaseException):
        return ran_out_of_memory(inner)
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def free_memory() -> None:
    """Free tensors in reference cycles, and GPU memory that PyTorch caches."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def num_rows(batch: Any, samples: float = 0) -> int:
    """Return the size of the first dimension that all tensors of a batch share.

    `samples` is the number of samples in the batch, or 0 if unknown.

    Raises:
        TypeError: If the batch cannot be split.
    """
    sizes: set[int] = set()

    def measure(leaf: Any) -> None:
        if leaf is None:
            return
        if not isinstance(leaf, torch.Tensor | np.ndarray):
            raise TypeError(f"it has a {type(leaf).__name__}, which is not a tensor")
        if not leaf.shape:
            raise TypeError("it has a tensor without dimensions")
        if (layout := getattr(leaf, "layout", torch.strided)) is not torch.strided:
            raise TypeError(f"it has a tensor of the layout {layout}")
        sizes.add(len(leaf))

    map_batch(batch, measure)
    if len(sizes) != 1:
        shown = " and ".join(map(str, sorted(sizes))) or "none"
        raise TypeError(f"its tensors do not share a first dimension ({shown})")
    rows = sizes.pop()
    if samples not in (0, rows) and _has_one_each(batch, samples):
        raise TypeError(f"it has a list of {samples:g} tensors, one for each sample")
    return rows


def _has_one_each(batch: Any, samples: float) -> bool:
    """Return whether a list or tuple in a batch holds one tensor per sample."""
    if isinstance(batch, dict):
        batch = list(batch.values())
    elif type(batch) not in (tuple, list):
        return False
    elif len(batch) == samples and all(isinstance(item, torch.Tensor) for item in batch):
        return True
    return any(_has_one_each(item, samples) for item in batch)


def batch_parts(batch: Any, number: int) -> list[Any]:
    rows = num_rows(batch)

    def part(index: int) -> Any:
        start, stop = part_of(rows, number, index)
        return map_batch(batch, lambda leaf: None if leaf is None else leaf[start:stop])

    return [part(index) for index in range(number)]


def concatenated(parts: Sequence[Any]) -> Any:
    is_tensor = isinstance(parts[0], torch.Tensor)
    return torch.cat(list(parts)) if is_tensor else np.concatenate(parts)


def in_own_containers(batch: Any) -> Any:
    """Return a copy of the containers of a batch, with the same tensors and other objects."""
    try:
        return map_batch(batch, lambda leaf: leaf)
    except Exception:  # classes of user code may raise
        return batch


def map_batch(
    batch: Any,
    convert: Callable[[Any], Any],
    is_leaf: Callable[[Any], bool] = lambda item: False,
) -> Any:
    """Return a batch with new containers, and `convert` applied to everything else.

    `is_leaf` selects containers that `convert` gets as a whole.
    """
    mapped = functools.partial(map_batch, convert=convert, is_leaf=is_leaf)
    if is_leaf(batch):
        return convert(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(mapped, batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map(mapped, batch))
    if isinstance(batch, dict | UserDict):
        made = copy.copy(batch)
        for key, item in batch.items():
            made[key] = mapped(item)
        return made
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = {field.name for field in dataclasses.fields(batch)}
        if set(getattr(batch, "__dict__", ())) <= names:
            like = copy.copy(batch)  # replace() would run __post_init__ again
            for name in names:
                object.__setattr__(like, name, mapped(getattr(batch, name)))
            return like
    return convert(batch)
