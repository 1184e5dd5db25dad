"""Which workers differ, and in what."""

import hashlib
import itertools
import platform
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

Key = TypeVar("Key", bound=Hashable)


def cpu_model() -> str:
    """Return the model of the CPU. Libraries choose operations by it, for example by its caches."""
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return model[1] if model else platform.machine()


def digest_of(values: Any) -> int:
    content = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    return int.from_bytes(content, "little", signed=True)


def differing(contents: list[dict[Key, Any]]) -> dict[Key, list[Any]]:
    """Return the contents that differ, with their values by rank."""
    differences = {}
    for key in dict.fromkeys(itertools.chain.from_iterable(contents)):
        values = [content.get(key, "absent") for content in contents]
        if len({repr(value) for value in values if value is not None}) > 1:
            differences[key] = values
    return differences


def minority_of(differences: Mapping[Any, list[Any]], size: int) -> list[int]:
    """Return the ranks that differ from the majority, or [] without a majority."""
    of_rank = [repr([values[rank] for values in differences.values()]) for rank in range(size)]
    common, count = Counter(of_rank).most_common(1)[0]
    return [rank for rank in range(size) if of_rank[rank] != common and 2 * count > size]


def name_workers(ranks: list[int]) -> str:
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def format_values(values: list[Any]) -> str:
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        ranks[repr(value)].append(rank)
    return ", ".join(
        f"{value[:100]} on {name_workers(holders)}" for value, holders in ranks.items()
    )
