"""Digests of tensors and states, computed on their device: any change of bits changes 64 bits."""

from __future__ import annotations

import functools
import hashlib
import io
import os
import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from raysgd._internal.nested import map_leaves
from raysgd.comm.mesh import as_bytes

_FACTOR = -7046029254386353131  # an odd number of 64 bits without a pattern
_WORDS = {"cpu": 2**16, "cuda": 2**21}
"""Number of 64-bit words that are multiplied together: as many as the cache of a CPU holds."""


def digest_of(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return a 64-bit digest of the bits of tensors and their positions, as a tensor on `device`.

    The tensors must be on `device`. Temporary memory is limited to 64 MiB, unless a tensor is not
    contiguous. The digest of a GPU is ready when its stream has reached this point.
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    num_words = _WORDS.get(device.type, _WORDS["cuda"])
    room = torch.empty(num_words, dtype=torch.int64, device=device)
    for words in _chunks(tensors, 8 * num_words):
        factors = _factors(num_words, device)[: words.numel()]
        # The products lose high bits, so add the high half to the low half first.
        mixed = torch.bitwise_right_shift(words, 32, out=room[: words.numel()]).bitwise_xor_(words)
        term = mixed.dot(factors) if device.type == "cpu" else mixed.mul_(factors).sum()
        total = total * _FACTOR + term + words.numel()
    return total


@functools.cache
def _factors(size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(size, dtype=torch.int64, device=device) * _FACTOR | 1


def _chunks(tensors: Iterable[torch.Tensor], size: int) -> Iterator[torch.Tensor]:
    """Yield the content of tensors as 64-bit words, in chunks of at most `size` bytes.

    Combine small tensors, because each operation on a GPU takes microseconds.
    """
    sections: list[torch.Tensor] = []
    total = 0
    for tensor in filter(has_bits, tensors):
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


def has_bits(tensor: torch.Tensor) -> bool:
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
        if not isinstance(leaf, torch.Tensor) or not has_bits(leaf):
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
        pickler.dump([int(digest_of(members, device)) for device, members in tensors.items()])
        return hashlib.sha256(file.getvalue()).digest()
