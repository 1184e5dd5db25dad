"""Which samples each worker gets: pure arithmetic over the order of one epoch.

At each step the workers together take the next samples of the epoch's order, as many as the global
batch has: rank 0 the first part of them, rank 1 the next, and so on. So a step of two workers is
the same set of samples as a step of one process with the global batch, and what is left of an epoch
is a plain offset: it can be shared out anew among any number of workers, at any step, without
losing or repeating a sample, and in the same steps.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

__all__ = ["EpochPartition", "MicroBatch", "even_part", "micro_batches_of"]


@dataclass(frozen=True)
class EpochPartition:
    """One worker's part of an epoch.

    Training (`even`) gives every worker a batch at every step, since each step is a collective:
    parts differ by one sample at most, and where there are fewer samples than workers some are
    given twice. Validation pads nothing: its batches are those of a single process, dealt out in
    turn, and at the last step some workers may have none.
    """

    total: int
    """Samples in the epoch."""
    batch_size: int
    """Samples of a worker's batch where the group has its full size."""
    world_size: int
    rank: int
    drop_last: bool = False
    """Leave out the samples at the end that do not fill a batch."""
    even: bool = True
    full_size: int | None = None
    """Workers of the full group, whose steps those of any other keep; None: steps follow the
    number of workers."""
    global_batch: int | None = None
    """Samples of a step, where these are no multiple of `batch_size`."""
    max_steps: int | None = None
    """Steps after which the epoch ends, if it has more."""

    @property
    def stride(self) -> int:
        """Samples that all workers take at a full step."""
        return self.global_batch or self.batch_size * (self.full_size or self.world_size)

    @property
    def at_once(self) -> int:
        """The most samples of a batch that are trained on at once."""
        return -(-self.stride // (self.full_size or self.world_size))

    def end(self, offset: int) -> int:
        """Return where the samples end that are used from `offset` on."""
        total = self.total
        if self.max_steps is not None:
            total = min(total, self.max_steps * self.stride)
        if not self.drop_last:
            return total
        unit = self.stride if self.even else self.batch_size
        return offset + (total - offset) // unit * unit

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

    def sizes(self, offset: int, num_steps: int | None = None) -> list[int]:
        """Return the samples of the steps of the group from `offset` on."""
        end, stride = self._end(offset, num_steps), self.stride
        return [min(stride, end - start) for start in range(offset, end, stride)]

    def batches(
        self, offset: int = 0, num_steps: int | None = None, in_parts: bool = False
    ) -> Iterator[tuple[int, int]]:
        """Yield this worker's batches from `offset` on, as (start, stop) in the epoch's order.

        With `num_steps`, those of so many steps of the group. With `in_parts`, a batch of more than
        `at_once` samples as several.
        """
        if not self.even:
            yield from self._dealt_out(offset, self._end(offset, num_steps))
            return
        start = offset
        for size in self.sizes(offset, num_steps):
            for low, high, _ in self._parts(size, in_parts):
                yield start + low, start + high
            start += size

    def _dealt_out(self, offset: int, end: int) -> Iterator[tuple[int, int]]:
        for start in range(
            offset + self.rank * self.batch_size, end, self.batch_size * self.world_size
        ):
            yield start, min(start + self.batch_size, end)

    def _end(self, offset: int, num_steps: int | None) -> int:
        end = self.end(offset)
        return end if num_steps is None else min(end, offset + num_steps * self.stride)

    def num_taken(self, offset: int, num_steps: int, in_parts: bool = False) -> int:
        """Return how many samples this worker takes at the first `num_steps` steps.

        Those are left out that are given a second time.
        """
        num_full = min(num_steps, self.num_steps(offset)) - 1
        if num_full < 0:
            return 0
        full, last = (
            self._taken(start, in_parts) for start in (offset, offset + num_full * self.stride)
        )
        return num_full * full + last

    def _taken(self, start: int, in_parts: bool) -> int:
        """Return how many samples this worker takes at the step that begins at `start`."""
        if not self.even:
            return sum(stop - first for first, stop in self.batches(start, 1))
        (size,) = self.sizes(start, 1)
        return sum(high - low for low, high, counts in self._parts(size, in_parts) if counts)

    def _parts(self, size: int, in_parts: bool) -> list[tuple[int, int, bool]]:
        return _parts(size, self.world_size, self.rank, self.at_once if in_parts else size)


@dataclass(frozen=True)
class MicroBatch:
    """The place of a batch, or of a part of one, in its group: in what makes one update."""

    position: int = 0
    """Batches and parts of the group before it."""
    planned: int = 1
    """How many the group will have, or the most where that is unknown."""
    is_last: bool = True
    """Whether the update follows."""
    step: int = 0
    """Steps of the group before its own."""
    ends_step: bool = True
    """Whether it is all of this worker's batch of the step, or the last part of it."""
    is_part: bool = False
    """Whether batches of the group come in parts."""
    is_large: bool = False
    """Whether it is a whole batch of more samples than are to be trained on at once."""
    size: float | None = None
    """Samples of it that count: none of those that are given a second time; None: unknown. Where
    the samples of a batch that is split are unknown, it counts as one."""
    total: int = 0
    """The same of all that this worker has in the group; 0: unknown, or none."""
    share: float = 1.0
    """What the mean over these counts for in the mean over the workers."""
    weight: float = 1
    """What it counts for in its batch; 0 for samples that are given a second time."""

    def parts(self, number: int, rows: int, planned: int, repeats: int = 0) -> Sequence[MicroBatch]:
        """Return the places of the parts into which a batch is split, `number` of them.

        Args:
            number: of parts.
            rows: the first dimension of the batch, which its parts share.
            planned: the most parts of any batch of the group.
            repeats: how many more follow, which count for nothing.
        """
        sizes = [high - low for low, high in (even_part(rows, number, i) for i in range(number))]
        weights = [size / rows if i < rows else 0.0 for i, size in enumerate(sizes)]
        weights += [0.0] * repeats
        whole = 1.0 if self.size is None else self.size
        return [
            replace(
                self,
                position=self.position + index,
                planned=self.planned * planned,
                is_last=self.is_last and index == len(weights) - 1,
                ends_step=self.ends_step and index == len(weights) - 1,
                is_part=True,
                size=whole * weight,
                total=self.planned if self.size is None else self.total,
                weight=self.weight * weight,
            )
            for index, weight in enumerate(weights)
        ]


@functools.lru_cache(maxsize=256)
def micro_batches_of(
    sizes: tuple[int, ...],
    world_size: int,
    rank: int,
    at_once: int,
    in_parts: bool,
) -> tuple[MicroBatch, ...]:
    """Return the places of what a worker has in a group of batches.

    Weighted by them, means over batches add up to the mean over all samples of the group, as one
    process has it.

    Args:
        sizes: samples of the steps of the group, for all workers.
        world_size: number of workers.
        rank: of this one.
        at_once: the most samples of a worker that are trained on at once.
        in_parts: whether larger batches come in parts, equally many on all workers.
    """
    found: list[tuple[int, int, bool, float]] = []
    parts_of = [_parts(size, world_size, rank, at_once if in_parts else size) for size in sizes]
    is_part = max(map(len, parts_of)) > 1
    for step, parts in enumerate(parts_of):
        own = [high - low if counts else 0 for low, high, counts in parts]
        for i, count in enumerate(own):
            weight = count / sum(own) if is_part and count else min(count, 1)
            found.append((count, step, i == len(own) - 1, weight))
    total = sum(count for count, *_ in found)
    return tuple(
        MicroBatch(
            position=position,
            planned=len(found),
            is_last=position == len(found) - 1,
            step=step,
            ends_step=ends_step,
            is_part=is_part,
            is_large=not in_parts and _num_parts(sizes[step], world_size, at_once) > 1,
            size=count,
            total=total,
            share=total * world_size / sum(sizes),
            weight=weight,
        )
        for position, (count, step, ends_step, weight) in enumerate(found)
    )


def _parts(size: int, world_size: int, rank: int, at_once: int) -> list[tuple[int, int, bool]]:
    """Return the parts of a step's samples that a worker has, as (start, stop, whether it counts).

    Equally many on all workers. Samples that are given a second time do not count.
    """
    first, stop = even_part(size, world_size, rank)
    number, rows = _num_parts(size, world_size, at_once), stop - first
    spans = [even_part(rows, number, part) for part in range(number)]
    return [
        (first + low, first + high, rank < size and part < rows)
        for part, (low, high) in enumerate(spans)
    ]


def _num_parts(size: int, world_size: int, at_once: int) -> int:
    """Return in how many parts the workers train their batches of a step of `size` samples.

    None has a part of one sample but where it must, since batch normalization fails on that.
    """
    smallest, largest = size // world_size, -(-size // world_size)
    number = -(-largest // at_once)
    return number if at_once == 1 else min(number, max(1, smallest // 2))


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
