"""Which samples each worker gets: pure arithmetic over the order of one epoch.

At each step the workers together take the next ``batch_size * world_size`` samples of the
epoch's order, rank 0 the first ``batch_size`` of them, rank 1 the next, and so on. So a step
of two workers with batch B is the same set of samples as a step of one process with batch 2B,
and what is left of an epoch is a plain offset: it can be shared out anew among any number of
workers, at any step, without losing or repeating a sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Shard", "even_part"]


@dataclass(frozen=True)
class Shard:
    """One worker's part of an epoch.

    Training (`even`) gives every worker a batch at every step, since each step is a collective:
    the last samples are shared out evenly, and where there are fewer than workers some are given
    twice. Validation pads nothing: its batches are those of a single process, dealt out in
    turn, and at the last step some workers may have none.
    """

    total: int
    """Samples in the epoch."""
    batch_size: int
    """Samples that one worker takes at a step."""
    world_size: int
    rank: int
    drop_last: bool = False
    """Leave out the samples at the end that do not fill a batch."""
    even: bool = True

    @property
    def stride(self) -> int:
        """Samples that all workers take at a full step."""
        return self.batch_size * self.world_size

    def end(self, offset: int) -> int:
        """Return where the samples end that are used from `offset` on."""
        if not self.drop_last:
            return self.total
        unit = self.stride if self.even else self.batch_size
        return offset + (self.total - offset) // unit * unit

    def num_steps(self, offset: int = 0) -> int:
        """Return how many steps the samples from `offset` on make."""
        return max(0, -(-(self.end(offset) - offset) // self.stride))

    def offset_after(self, offset: int, num_steps: int) -> int:
        """Return where the epoch stands `num_steps` steps after `offset`."""
        if num_steps == 0:
            return offset
        if self.num_steps(offset) <= num_steps:
            return self.total
        return offset + num_steps * self.stride

    def batches(self, offset: int = 0, num_steps: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield this worker's batches from `offset` on, as (start, stop) in the epoch's order.

        With `num_steps`, those of so many steps of the group.
        """
        end, stride = self.end(offset), self.stride
        if num_steps is not None:
            end = min(end, offset + num_steps * stride)
        for start in range(offset, end, stride):
            size = min(stride, end - start)  # of this step, for all workers
            if self.even:
                first, stop = even_part(size, self.world_size, self.rank)
            else:
                first = self.rank * self.batch_size
                stop = min(first + self.batch_size, size)
            if first < stop:
                yield start + first, start + stop

    def num_taken(self, offset: int, num_steps: int) -> int:
        """Return how many samples this worker takes at the first `num_steps` steps."""
        num_full = min(num_steps, self.num_steps(offset)) - 1
        if num_full < 0:
            return 0
        last = self.batches(offset + num_full * self.stride, 1)
        return num_full * self.batch_size + sum(stop - start for start, stop in last)


def even_part(total: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return one worker's part of `total` samples, as (start, stop): sizes differ by one at most.

    Where there are fewer samples than workers, some are given twice.

    >>> [even_part(5, 3, rank) for rank in range(3)]
    [(0, 2), (2, 4), (4, 5)]
    >>> [even_part(2, 3, rank) for rank in range(3)]
    [(0, 1), (1, 2), (0, 1)]
    """
    if total < world_size:
        first = rank % total
        return first, first + 1
    share, extra = divmod(total, world_size)
    first = rank * share + min(rank, extra)
    return first, first + share + (rank < extra)
