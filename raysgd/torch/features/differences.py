"""Which workers differ, and in what."""

from __future__ import annotations

import hashlib
import itertools
import platform
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)


def kind_of(device: torch.device) -> str:
    """Return what determines the rounding of a computation, apart from data and seeds."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        # Libraries choose operations by the model of the CPU, for example by its cache sizes.
        info = Path("/proc/cpuinfo")
        model = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
        name = f"{model[1] if model else platform.machine()} "
        name += f"({torch.backends.cpu.get_cpu_capability()})"
    return f"{name} with PyTorch {torch.__version__} and {torch.get_num_threads()} threads"


def hash_of(values: Any) -> int:
    content = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    return int.from_bytes(content, "little", signed=True)


def differing(contents: list[dict[Key, Any]]) -> dict[Key, list[Any]]:
    """Return the contents that differ, with their values by rank."""
    differences = {}
    for key in dict.fromkeys(itertools.chain.from_iterable(contents)):
        values = [each.get(key, "absent") for each in contents]
        if len({repr(value) for value in values if value is not None}) > 1:
            differences[key] = values
    return differences


def majority_of(differences: Mapping[Any, list[Any]], size: int) -> tuple[list[int], list[int]]:
    """Return the ranks of the majority, and of the minority. Both are empty without a majority."""
    of_rank = [repr([values[rank] for values in differences.values()]) for rank in range(size)]
    common, count = Counter(of_rank).most_common(1)[0]
    if 2 * count <= size:
        return [], []
    ranks = range(size)
    return [r for r in ranks if of_rank[r] == common], [r for r in ranks if of_rank[r] != common]


def named_workers(ranks: list[int]) -> str:
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def shown(values: list[Any]) -> str:
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        ranks[repr(value)].append(rank)
    return ", ".join(
        f"{value[:100]} on {named_workers(holders)}" for value, holders in ranks.items()
    )
