"""Which elements each rank holds, and what ranks send when the group changes."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from raysgd.torch.sharding.pieces import Slot, rows_of

__all__ = ["Layout", "RowLayout", "Transfer", "share_of", "transfers"]

_ALIGNMENT = 16
"""Alignment in bytes, a multiple of the size of every dtype."""


def share_of(total: int, size: int, rank: int) -> tuple[int, int]:
    """Return the start and the exclusive end of the elements that a rank updates.

    >>> [share_of(10, 3, rank) for rank in range(3)]
    [(0, 3), (3, 6), (6, 10)]
    """
    return total * rank // size, total * (rank + 1) // size


class Transfer(NamedTuple):
    """Elements that one rank has, and the ranks that need them. These can include that rank."""

    start: int
    stop: int
    version: int
    source: int
    to: tuple[int, ...]


def transfers(
    shares: Sequence[Sequence[tuple[int, int]]],
    copies: int,
    lowest: int,
    held: Sequence[Iterable[tuple[int, int, int]]],
) -> list[Transfer] | None:
    """Plan transfers after which each rank has its share, and copies of the shares before it.

    Args:
        shares: for each rank, the ranges of its share. All shares together are all elements.
        copies: the number of other ranks that hold each share.
        lowest: version of the parameters. State of an older version is unusable.
        held: for each rank, the ranges that it has, with their versions.

    Returns:
        The transfers, in the same order on all ranks; None if some elements are lost on all ranks.

    >>> transfers([[(0, 3)], [(3, 6)]], 0, 1, [[(0, 6, 1)], []])
    [Transfer(start=0, stop=3, version=1, source=0, to=(0,)), \
Transfer(start=3, stop=6, version=1, source=0, to=(1,))]
    >>> transfers([[(0, 3)], [(3, 6)]], 0, 1, [[(0, 4, 1)], []]) is None
    True
    """
    size = len(shares)
    bounds = {bound for share in shares for each in share for bound in each}
    cuts = sorted(bounds.union(*(each[:2] for of_rank in held for each in of_rank)))
    place = {cut: number for number, cut in enumerate(cuts)}
    owners: dict[int, int] = {}
    for rank, share in enumerate(shares):
        owners |= {n: rank for start, stop in share for n in range(place[start], place[stop])}
    versions: list[dict[int, int]] = [{} for _ in cuts]  # by rank, for each range between two cuts
    for rank, of_rank in enumerate(held):
        for start, stop, version in of_rank:
            for number in range(place[start], place[stop]) if version >= lowest else ():
                # A rank may hold a range and have imported it too.
                versions[number][rank] = max(version, versions[number].get(rank, version))
    planned: list[Transfer] = []
    load = [0] * size
    for number, owner in sorted(owners.items()):
        start, stop, found = cuts[number], cuts[number + 1], versions[number]
        if not found:
            return None
        newest = max(found.values())
        sources = [rank for rank, version in found.items() if version == newest]
        holders = [(owner + each) % size for each in range(min(copies, size - 1) + 1)]
        keep = [rank for rank in holders if rank in sources]
        planned += [Transfer(start, stop, newest, rank, (rank,)) for rank in keep]
        if lacking := tuple(rank for rank in holders if rank not in sources):
            source = min(sources, key=lambda rank: (load[rank], rank))
            load[source] += stop - start
            planned.append(Transfer(start, stop, newest, source, lacking))
    return planned


class Layout:
    """The division of all elements of some parameters, concatenated, into one share per rank.

    Args:
        parameters: the parameters.
        is_updated: for each parameter, whether the optimizer updates it.
        copies: how many other ranks hold each share; None for one if there are three ranks or more.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        is_updated: Sequence[bool],
        copies: int | None,
    ) -> None:
        self._shapes = [parameter.shape for parameter in parameters]
        pairs = zip(parameters, is_updated, strict=True)
        self._widths = [p.element_size() if is_used else None for p, is_used in pairs]
        self._copies = copies
        self.starts = [0, *itertools.accumulate(parameter.numel() for parameter in parameters)]
        """For each parameter, the place of its first element in the row."""
        self.rank = 0
        self.slots: list[tuple[list[Slot], int]] = []
        """For each share, its slots in a buffer, and the size of the buffer in bytes."""

    @property
    def size(self) -> int:
        return len(self.slots)

    def share(self, number: int, size: int) -> list[tuple[int, int]]:
        """Return the ranges of a share in a group of `size` ranks."""
        return [share_of(self.starts[-1], size, number)]

    def num_copies(self, size: int) -> int:
        return min(int(size >= 3) if self._copies is None else self._copies, size - 1)

    def held_shares(self) -> list[int]:
        """Return the shares that this rank holds, its own first."""
        return [(self.rank - n) % self.size for n in range(self.num_copies(self.size) + 1)]

    def cuts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the index, first element, and end of each parameter in a range of all elements."""
        index = bisect.bisect_right(self.starts, start) - 1
        while start < stop:
            first, end = self.starts[index], min(self.starts[index + 1], stop)
            if start < end:
                yield index, start - first, end - first
            start, index = max(start, end), index + 1

    def lay_out(self) -> None:
        """Compute the shares for the current group."""
        # A worker that loads a snapshot before it enters a group has no process group.
        is_in_group = dist.is_initialized()
        self.rank, size = (dist.get_rank(), dist.get_world_size()) if is_in_group else (0, 1)
        self.slots = []
        for share in range(size):
            slots, place = [], 0
            for index, a, b in (c for each in self.share(share, size) for c in self.cuts(*each)):
                if (width := self._widths[index]) is not None:
                    slots.append(Slot(index, a, b, place))
                    place += -(-(b - a) * width // _ALIGNMENT) * _ALIGNMENT
            self.slots.append((slots, place))

    def room(self, share: int, device: torch.device) -> torch.Tensor:
        _, size = self.slots[share]
        return torch.empty(size, dtype=torch.uint8, device=device)


class RowLayout(Layout):
    """The rows of each parameter that ``fully_shard`` gives the ranks."""

    def part(self, index: int, number: int, size: int) -> tuple[int, int]:
        """Return the start and the exclusive end of a share within a flattened parameter."""
        num_rows, *rest = self._shapes[index]
        width = math.prod(rest)
        start, stop = rows_of(num_rows, size, number)
        return start * width, stop * width

    def share(self, number: int, size: int) -> list[tuple[int, int]]:
        parts = (self.part(index, number, size) for index in range(len(self._shapes)))
        shifted = zip(self.starts, parts, strict=False)
        return [(first + start, first + stop) for first, (start, stop) in shifted if start < stop]
