"""The shards of models and optimizers: which elements each rank holds and sends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

_ALIGNMENT = 16
"""Number of elements at whose multiples shards begin, because kernels prefer aligned tensors."""
Shard: TypeAlias = Mapping[int, tuple[int, int]]
"""For some parameters, by index, the first element and the exclusive end of a range."""


class Transfer(NamedTuple):
    """Elements that rank `src` sends to the ranks `dst`, or keeps if this is only `src`."""

    param_index: int
    start: int
    stop: int
    version: int
    src: int
    dst: tuple[int, ...]


def plan_transfers(
    shards: Sequence[Shard],
    num_copies: int,
    min_version: int,
    pieces_by_rank: Sequence[Iterable[tuple[int, int, int, int]]],
) -> list[Transfer] | None:
    """Plan the transfers that give each rank its shard, and copies of the shards before it.

    Args:
        shards: the shard of each rank. The shards together contain all elements.
        num_copies: the number of other ranks that hold each shard.
        min_version: version of the parameters. State of an older version is unusable.
        pieces_by_rank: for each rank, its pieces: index of the parameter, start, end, and version.

    Returns:
        The transfers, in the same order on all ranks; None if some elements are lost on all ranks.

    >>> plan_transfers([{0: (0, 3)}, {0: (3, 6)}], 0, 1, [[(0, 0, 4, 1)], []]) is None
    True
    """
    size = len(shards)
    ranges = [(param_index, *bounds) for shard in shards for param_index, bounds in shard.items()]
    ranges += [piece[:3] for pieces in pieces_by_rank for piece in pieces]
    cuts = sorted({(param_index, bound) for param_index, *bounds in ranges for bound in bounds})
    range_at = {cut: index for index, cut in enumerate(cuts)}
    versions: list[dict[int, int]] = [{} for _ in cuts]  # by rank, for each range between two cuts
    for rank, pieces in enumerate(pieces_by_rank):
        for param_index, start, stop, version in pieces:
            for index in range(range_at[param_index, start], range_at[param_index, stop]):
                # A rank may hold a range twice, because it also imported a replica.
                versions[index][rank] = max(version, versions[index].get(rank, version))
    planned: list[Transfer] = []
    for owner, shard in enumerate(shards):
        holders = [(owner + distance) % size for distance in range(min(num_copies, size - 1) + 1)]
        for param_index, (first, end) in shard.items():
            for index in range(range_at[param_index, first], range_at[param_index, end]):
                (_, start), (_, stop) = cuts[index : index + 2]
                newest = max(versions[index].values(), default=min_version - 1)
                if newest < min_version:
                    return None
                sources = [rank for rank, has in versions[index].items() if has == newest]
                keep = [rank for rank in holders if rank in sources]
                planned += [Transfer(param_index, start, stop, newest, n, (n,)) for n in keep]
                if lacking := tuple(rank for rank in holders if rank not in sources):
                    src = sources[index % len(sources)]  # spreads the load
                    planned.append(Transfer(param_index, start, stop, newest, src, lacking))
    return planned


class ShardBuffers(NamedTuple):
    """Memory for the updated elements of a shard."""

    buffers: list[torch.Tensor]
    """One buffer per dtype."""
    views: dict[int, torch.Tensor]
    """The elements of each parameter, as a view."""

    def bytes(self) -> list[torch.Tensor]:
        """Return the buffers to send. Backends lack some dtypes."""
        return [buffer.view(torch.uint8) for buffer in self.buffers]


class ShardLayout:
    """The shards of all ranks.

    Args:
        parameters: the parameters.
        updated: indices of the parameters that the optimizer updates, which are divided apart.
        num_copies: number of other ranks that hold each shard. None: 1 with three or more ranks.
        by_rows: whether a shard has the rows of each parameter that ``fully_shard`` gives a rank.
            Otherwise it is a range of all elements, concatenated.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        updated: Collection[int],
        num_copies: int | None,
        by_rows: bool = False,
    ) -> None:
        self.updated = updated
        self._shapes = [parameter.shape for parameter in parameters]
        self._dtypes = [parameter.dtype for parameter in parameters]
        others = [index for index in range(len(parameters)) if index not in updated]
        self._groups = sorted(updated), others
        self._num_copies, self._by_rows = num_copies, by_rows
        self.rank = self.size = 0
        self.shards: list[Shard] = []

    def shard(self, number: int, size: int) -> Shard:
        """Return a shard in a group of `size` ranks."""
        shard = {}
        for group in self._groups:
            before, total = 0, sum(self._shapes[index].numel() for index in group)
            shard_size = -(-total // (size * _ALIGNMENT)) * _ALIGNMENT
            for index in group:
                length = (shape := self._shapes[index]).numel()
                if self._by_rows and length:
                    shard_size, before = -(-shape[0] // size) * (length // shape[0]), 0
                start = max(number * shard_size - before, 0)
                end = min((number + 1) * shard_size - before, length)
                before += length
                if start < end:
                    shard[index] = start, end
        return shard

    def compute_shards(self) -> None:
        """Compute the shards for the current group."""
        # A worker that loads a snapshot before it enters a group has no process group.
        is_in_group = dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if is_in_group else (0, 1)
        self.shards = [self.shard(number, self.size) for number in range(self.size)]

    def num_copies(self, size: int) -> int:
        return min(int(size >= 3) if self._num_copies is None else self._num_copies, size - 1)

    def held_shards(self) -> list[int]:
        """Return the shards that this rank holds, its own first."""
        return [(self.rank - n) % self.size for n in range(self.num_copies(self.size) + 1)]

    def pieces_of(self, shard: int, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the pieces of a shard."""
        pairs = [(piece, self.shards[shard].get(piece.param_index, (0, 0))) for piece in pieces]
        return [p for p, (first, end) in pairs if first <= p.start and p.stop <= end]

    def new_buffers(self, shard: int, device: torch.device) -> ShardBuffers:
        lengths_by_dtype: dict[torch.dtype, dict[int, int]] = defaultdict(dict)
        for param_index, (start, stop) in self.shards[shard].items():
            if param_index in self.updated:
                lengths_by_dtype[self._dtypes[param_index]][param_index] = stop - start
        new = ShardBuffers([], {})
        for dtype, lengths in lengths_by_dtype.items():
            buffer = torch.empty(sum(lengths.values()), dtype=dtype, device=device)
            new.buffers.append(buffer)
            new.views.update(zip(lengths, buffer.split(list(lengths.values())), strict=True))
        return new

    def all_gather_updates(
        self, held: dict[int, ShardBuffers], device: torch.device
    ) -> dict[int, ShardBuffers]:
        """Return the updated elements of all shards. Every rank must call this with those it holds.

        One broadcast per shard sends as much as an all-gather, and needs half the memory.
        """
        if len(held) == self.size:
            return held
        updated = {
            n: held[n] if n == self.rank else self.new_buffers(n, device) for n in range(self.size)
        }
        works = [
            dist.broadcast(buffer, src=shard, async_op=True)
            for shard, update in updated.items()
            for buffer in update.bytes()
        ]
        for work in works:
            work.wait()
        if device.type == "cuda":  # errors must surface before parameters change
            torch.cuda.current_stream().synchronize()
        return updated


# ---- pieces of shards


@dataclass(eq=False)
class Piece:
    """Consecutive elements of one parameter."""

    param_index: int
    start: int
    stop: int
    version: int
    """Number of updates of the elements."""
    state: dict[str, Any]
    """State of the elements in the optimizer."""
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    """The elements after each step of the optimizer, by version, until the update is committed."""
    base: torch.Tensor | None = None
    """The elements before the update. None if this worker has the complete parameter."""


def is_per_element(value: Any) -> bool:
    """Return whether a value of a piece has an entry per element. Other values are scalars."""
    return isinstance(value, torch.Tensor) and value.dim() == 1


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a contiguous tensor, without a copy."""
    return tensor.detach().view(-1)
