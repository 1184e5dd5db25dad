"""Computes which samples of an epoch each worker uses.

At each step, the workers together take the next global batch of the epoch: rank 0 the first part,
rank 1 the next, and so on. The rest of an epoch is a plain offset, from which any number of workers
can continue without losing or repeating a sample.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class EpochPartition:
    """One worker's part of an epoch.

    In training (`even`), every worker has a batch at every step. If a step has fewer samples than
    workers, some workers repeat a sample. Validation (not `even`) repeats nothing: it deals batches
    out in turn, so a worker can have no batch at the last step.
    """

    total: int
    batch_size: int  # samples per worker and batch in a group of full size
    world_size: int
    rank: int
    drop_last: bool = False
    even: bool = True
    full_size: int | None = None  # workers that define the size of a step; None: the current ones
    global_batch: int | None = None  # samples per step, if not a multiple of `batch_size`
    shares: tuple[float, ...] | None = None  # relative shares of the workers, by rank

    @property
    def stride(self) -> int:
        """Samples of the whole group in a full step."""
        return self.global_batch or self.batch_size * (self.full_size or self.world_size)

    @property
    def at_once(self) -> int:
        """Maximum number of samples that a worker processes at a time."""
        return -(-self.stride // (self.full_size or self.world_size))

    def end(self, offset: int) -> int:
        """Return the exclusive end index of the samples used from `offset`."""
        if not self.drop_last:
            return self.total
        unit = self.stride if self.even else self.batch_size
        return offset + (self.total - offset) // unit * unit

    def num_steps(self, offset: int = 0) -> int:
        return max(0, -(-(self.end(offset) - offset) // self.stride))

    def offset_after(self, offset: int, num_steps: int) -> int:
        if num_steps == 0:
            return offset
        if self.num_steps(offset) <= num_steps:
            return self.total
        return offset + num_steps * self.stride

    def sizes(self, offset: int, num_steps: int | None = None) -> Iterator[int]:
        """Iterate over the sample counts of the group's steps from `offset`."""
        end, stride = self._end(offset, num_steps), self.stride
        return (min(stride, end - start) for start in range(offset, end, stride))

    def batches(
        self, offset: int = 0, num_steps: int | None = None, in_parts: bool = False
    ) -> Iterator[tuple[int, int]]:
        """Yield this worker's batches from `offset`, as (start, stop) in the order of the epoch.

        `num_steps` limits the steps of the group. `in_parts` splits a batch of more than `at_once`
        samples.
        """
        if not self.even:
            yield from self._dealt_out(offset, self._end(offset, num_steps))
            return
        start = offset
        for size in self.sizes(offset, num_steps):
            for low, high, _ in self._parts(size, in_parts):
                yield start + low, start + high
            start += size

    def num_batches(self) -> int:
        """Return the number of this worker's batches in an epoch."""
        return self.num_steps() if self.even else len(self._own_batches(0, self.end(0)))

    def _own_batches(self, offset: int, end: int) -> range:
        return range(self.rank, -(-(end - offset) // self.batch_size), self.world_size)

    def _dealt_out(self, offset: int, end: int) -> Iterator[tuple[int, int]]:
        for batch in self._own_batches(offset, end):
            start = offset + batch * self.batch_size
            yield start, min(start + self.batch_size, end)

    def _end(self, offset: int, num_steps: int | None) -> int:
        end = self.end(offset)
        return end if num_steps is None else min(end, offset + num_steps * self.stride)

    def _parts(self, size: int, in_parts: bool) -> list[tuple[int, int, bool]]:
        at_once = self.at_once if in_parts else size
        return _parts(size, self.world_size, self.rank, at_once, self.shares)


@dataclass(frozen=True)
class MicroBatch:
    """The role of a batch, or of a part of one, in the group of batches of one update."""

    position: int = 0  # number of earlier batches and parts in the group
    planned: int = 1  # number of batches and parts in the group, or the maximum if unknown
    is_last: bool = True  # the update follows directly
    step: int = 0  # number of earlier steps in the group
    ends_step: bool = True  # the last part of the worker's batch in the step
    is_part: bool = False  # the batches of the group are split
    is_large: bool = False  # an unsplit batch of more than `at_once` samples
    # Samples, without repeated ones. None: unknown, and the sizes of the parts add up to 1.
    size: float | None = None
    total: int = 0  # samples of this worker in the group; 0: unknown, or none
    share: float = 1.0  # weight of this worker's mean in the mean over the workers
    weight: float = 1  # weight of a part within its batch; 0 for repeated samples

    def parts(self, number: int, rows: int, planned: int, repeats: int = 0) -> Sequence[MicroBatch]:
        """Return the roles of the `number` parts of this batch, which has `rows` samples.

        `planned` is the largest number of parts in the group. `repeats` parts of weight 0 follow.
        """
        sizes = [high - low for low, high in (part_of(rows, number, i) for i in range(number))]
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
    shares: tuple[float, ...] | None = None,
) -> tuple[MicroBatch, ...]:
    """Return the roles of a worker's batches in a group, whose steps have `sizes` samples.

    With these weights, means over batches add up to the mean over all samples of the group.
    `in_parts` splits batches of more than `at_once` samples, equally often on all workers.
    """
    found: list[tuple[int, int, bool, float]] = []
    parts_of = [
        _parts(size, world_size, rank, at_once if in_parts else size, shares) for size in sizes
    ]
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
            is_large=not in_parts and _num_parts(sizes[step], world_size, at_once, shares) > 1,
            size=count,
            total=total,
            share=total * world_size / sum(sizes),
            weight=weight,
        )
        for position, (count, step, ends_step, weight) in enumerate(found)
    )


def _parts(
    size: int, world_size: int, rank: int, at_once: int, shares: tuple[float, ...] | None
) -> list[tuple[int, int, bool]]:
    """Return a worker's parts of a step as (start, stop, whether the samples count)."""
    first, stop = part_of(size, world_size, rank, shares)
    number, rows = _num_parts(size, world_size, at_once, shares), stop - first
    spans = [part_of(rows, number, part) for part in range(number)]
    return [
        (first + low, first + high, rank < size and part < rows)
        for part, (low, high) in enumerate(spans)
    ]


def _num_parts(
    size: int, world_size: int, at_once: int, shares: tuple[float, ...] | None = None
) -> int:
    """Return the number of parts of each worker's batch in a step of `size` samples."""
    number = -(-size // (world_size * at_once))
    if at_once == 1:
        return number
    # Avoid parts of one sample, because batch normalization fails on them.
    spans = [part_of(size, world_size, rank, shares) for rank in range(world_size)]
    return min(number, max(1, min(stop - first for first, stop in spans) // 2))


def part_of(
    total: int, world_size: int, rank: int, shares: tuple[float, ...] | None = None
) -> tuple[int, int]:
    """Return one worker's part of `total` samples as (start, stop), in proportion to its share.

    If there are fewer samples than workers, workers share samples.

    >>> [part_of(5, 3, rank) for rank in range(3)]
    [(0, 2), (2, 4), (4, 5)]
    >>> [part_of(2, 3, rank) for rank in range(3)]
    [(0, 1), (1, 2), (0, 1)]
    >>> [part_of(8, 2, rank, shares=(3.0, 1.0)) for rank in range(2)]
    [(0, 6), (6, 8)]
    """
    if total < world_size:
        first = rank % total
        return first, first + 1
    if shares is not None:
        bounds = _bounds(total, shares)
        return bounds[rank], bounds[rank + 1]
    share, extra = divmod(total, world_size)
    first = rank * share + min(rank, extra)
    return first, first + share + (rank < extra)


@functools.lru_cache(maxsize=256)
def _bounds(total: int, shares: tuple[float, ...]) -> list[int]:
    bounds, sum_of_shares = [0], sum(shares)
    for rank, sum_so_far in enumerate(itertools.accumulate(shares), start=1):
        num_later = len(shares) - rank
        ideal = round(total * sum_so_far / sum_of_shares)
        bounds.append(min(max(ideal, bounds[-1] + 1), total - num_later))
    return bounds
