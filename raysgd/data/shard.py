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

__all__ = ["Shard"]


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
        stop = self.end(offset)
        if num_steps is not None:
            stop = min(stop, offset + num_steps * self.stride)
        for start in range(offset, stop, self.stride):
            left = min(stop, start + self.stride) - start
            batch = self._full(start) if left == self.stride else self._last(start, left)
            if batch is not None:
                yield batch

    def num_taken(self, offset: int, num_steps: int) -> int:
        """Return how many samples this worker takes at the first `num_steps` steps."""
        num_steps = min(num_steps, self.num_steps(offset))
        if num_steps == 0:
            return 0
        before = (num_steps - 1) * self.stride
        last = next(self.batches(offset + before, 1), (0, 0))
        return before // self.world_size + last[1] - last[0]

    def _full(self, start: int) -> tuple[int, int]:
        first = start + self.rank * self.batch_size
        return first, first + self.batch_size

    def _last(self, start: int, left: int) -> tuple[int, int] | None:
        """Return this worker's part of the last step, which has `left` samples in all."""
        if not self.even:
            first = start + self.rank * self.batch_size
            return (
                (first, min(first + self.batch_size, start + left))
                if (first < start + left)
                else None
            )
        if left < self.world_size:
            first = start + self.rank % left
            return first, first + 1
        share, extra = divmod(left, self.world_size)
        first = start + self.rank * share + min(self.rank, extra)
        return first, first + share + (self.rank < extra)
