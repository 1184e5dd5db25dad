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
class StepLayout:
    """The size of each step of a group, and its parts: by workers, or by logical workers.

    By workers, each worker trains one part, also if the group `keeps_global_batch`.
    The number of logical workers is fixed: a worker trains the parts of several one after the
    other. `CONTRIBUTING.md` defines these terms.
    """

    num_planned: int | None = None  # workers that a step is sized for; None: the current ones
    logical_workers_argument: str = ""  # that sets logical workers, for messages; "": none
    seeds_parts: bool = False  # generators of random numbers are seeded for each part

    @functools.cached_property
    def has_logical_workers(self) -> bool:
        """Whether a step has a part for each logical worker."""
        return bool(self.logical_workers_argument)

    @functools.cached_property
    def keeps_global_batch(self) -> bool:
        """Whether the size of a step does not depend on the number of workers."""
        return self.num_planned is not None

    def num_planned_workers(self, num_workers: int) -> int:
        """Return the number of workers, or of logical workers, that a step is sized for."""
        return self.num_planned or num_workers

    def num_trained_parts(self, num_workers: int) -> int:
        """Return the number of parts that `num_workers` workers train in a step."""
        return self.num_planned_workers(num_workers) if self.has_logical_workers else num_workers


BY_WORKERS = StepLayout()
"""A step has a part for each current worker, so that its size depends on their number."""


@dataclass(frozen=True, eq=False)
class EpochPartition:
    """One worker's partition: its samples of an epoch.

    In `training`, every worker has a batch at every step. If a step has fewer samples than workers,
    some workers repeat a sample. Validation repeats nothing: it deals batches out in turn, so a
    worker can have no batch at the last step.
    """

    epoch_size: int
    batch_size: int  # samples per worker and batch in a group of full size
    world_size: int
    rank: int
    drop_last: bool = False
    training: bool = True
    layout: StepLayout = BY_WORKERS
    # Samples per step, if not a multiple of `batch_size`.
    requested_global_batch_size: int | None = None
    shares: tuple[float, ...] | None = None  # relative sizes of the workers' parts, by rank
    may_split: bool = False
    """Whether batches above `max_micro_batch_size` are split, equally often on all workers."""

    @functools.cached_property
    def global_batch_size(self) -> int:
        """Samples of the whole group in a full step."""
        return self.requested_global_batch_size or self.batch_size * self.num_planned_workers

    @functools.cached_property
    def num_planned_workers(self) -> int:
        """Number of workers, or of logical workers, that a step is sized for."""
        return self.layout.num_planned_workers(self.world_size)

    @functools.cached_property
    def logical_workers(self) -> range:
        """The logical workers whose parts of each step this worker trains one after the other."""
        bounds = part_bounds(self.num_planned_workers, self.world_size, self.rank, self.shares)
        return range(*bounds)

    @functools.cached_property
    def max_micro_batch_size(self) -> int:
        """Maximum number of samples that a worker with an even share processes at a time."""
        return -(-self.global_batch_size // self.num_planned_workers)

    def end_index(self, offset: int) -> int:
        """Return the exclusive end index of the samples used from `offset`."""
        if not self.drop_last:
            return self.epoch_size
        unit = self.global_batch_size if self.training else self.batch_size
        return offset + (self.epoch_size - offset) // unit * unit

    def num_steps(self, offset: int = 0) -> int:
        return max(0, -(-(self.end_index(offset) - offset) // self.global_batch_size))

    def offset_after(self, offset: int, num_steps: int) -> int:
        after = offset + num_steps * self.global_batch_size
        return self.epoch_size if num_steps and after >= self.end_index(offset) else after

    def global_batch_sizes(self, offset: int, num_steps: int | None = None) -> Iterator[int]:
        """Iterate over the sample counts of the group's steps from `offset`."""
        num_samples = max(0, self._end_of_steps(offset, num_steps) - offset)
        num_full, rest = divmod(num_samples, self.global_batch_size)
        return itertools.chain(
            itertools.repeat(self.global_batch_size, num_full), [rest] * (rest > 0)
        )

    def spans(self, offset: int = 0, num_steps: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield this worker's batches from `offset`, as (start, stop) in the order of the epoch.

        `num_steps` limits the steps of the group.
        """
        if not self.training:
            end = self._end_of_steps(offset, num_steps)
            for start in self._own_starts(offset, end):
                yield start, min(start + self.batch_size, end)
            return
        for size in self.global_batch_sizes(offset, num_steps):
            for low, high, _ in self._micro_batches(size):
                yield offset + low, offset + high
            offset += size

    def num_batches(self) -> int:
        """Return the number of steps of an epoch, or of this worker's batches in validation."""
        return self.num_steps() if self.training else len(self._own_starts(0, self.end_index(0)))

    def _own_starts(self, offset: int, end: int) -> range:
        """Return where the batches begin that this worker gets in turn."""
        return range(offset + self.rank * self.batch_size, end, self.world_size * self.batch_size)

    def _end_of_steps(self, offset: int, num_steps: int | None) -> int:
        end = self.end_index(offset)
        return end if num_steps is None else min(end, offset + num_steps * self.global_batch_size)

    @functools.lru_cache(maxsize=256)  # noqa: B019  a partition is small
    def _micro_batches(self, size: int) -> list[tuple[int, int, bool]]:
        """Return this worker's micro-batches of a step as (start, stop, whether they count)."""
        if self.layout.has_logical_workers:
            number, own = self.num_planned_workers, self.logical_workers
            return [(*part_bounds(size, number, i), i < size) for i in own]
        first, stop = part_bounds(size, self.world_size, self.rank, self.shares)
        number = self._num_micro_batches(size) if self.may_split else 1
        rows = stop - first
        spans = [part_bounds(rows, number, index) for index in range(number)]
        return [
            (first + low, first + high, self.rank < size and index < rows)
            for index, (low, high) in enumerate(spans)
        ]

    def _num_micro_batches(self, size: int) -> int:
        """Return how many micro-batches each worker's batch in a step of `size` samples has."""
        number = -(-size // (self.world_size * self.max_micro_batch_size))
        if self.max_micro_batch_size == 1:
            return number
        # Avoid micro-batches of one sample, because batch normalization fails on them.
        ranks = range(self.world_size)
        spans = [part_bounds(size, self.world_size, rank, self.shares) for rank in ranks]
        return min(number, max(1, min(stop - first for first, stop in spans) // 2))

    @functools.lru_cache(maxsize=256)  # noqa: B019  a partition is small
    def plan(self, sizes: tuple[int, ...]) -> UpdatePlan:
        """Return this worker's micro-batches in an update, whose steps have `sizes` samples."""
        planned: list[MicroBatchPlan] = []
        for step, size in enumerate(sizes):
            spans = self._micro_batches(size)
            counted = [stop - first if counts else 0 for first, stop, counts in spans]
            total = sum(counted)
            for index, count in enumerate(counted):
                weight = min(count, 1) if count == total else count / total  # of all: an int
                if self.layout.has_logical_workers:  # which a worker has one or more of
                    weight = count
                planned.append(MicroBatchPlan(count, weight, step, index == len(counted) - 1))
        has_logical_workers = self.layout.has_logical_workers
        is_unsplit = not (has_logical_workers or self.may_split)
        is_oversized = is_unsplit and any(self._num_micro_batches(size) > 1 for size in sizes)
        return UpdatePlan(tuple(planned), sum(sizes), is_oversized, has_logical_workers)


@dataclass(frozen=True)
class MicroBatchPlan:
    """Size and weight, without data, of what a worker trains at a time: a batch, or rows of it."""

    num_samples: float | None = None  # without repeated samples; None: unknown
    weight: float = 1
    """Weight of metrics without ``num_samples``: the fraction of the worker's samples in the step,
    or, with logical workers, the number of samples. 0 for repeated samples."""
    step_index: int = 0  # number of earlier steps in the update
    ends_step: bool = True  # the last one of the worker's batch
    num_splits: int = 1  # number of micro-batches of the same batch, after memory ran out

    @functools.cached_property
    def is_repeated(self) -> bool:
        """Whether another worker has the same samples, so that these do not count."""
        return self.weight == 0

    def split(self, sizes: Sequence[int]) -> list[MicroBatchPlan]:
        """Split this batch, given the rows of each. A micro-batch of 0 rows repeats another."""
        total = sum(sizes)
        return [
            replace(
                self,
                num_samples=None if self.num_samples is None else self.num_samples * size / total,
                weight=self.weight * size / total,
                ends_step=self.ends_step and index == len(sizes) - 1,
                num_splits=len(sizes),
            )
            for index, size in enumerate(sizes)
        ]


@dataclass(frozen=True)
class UpdatePlan:
    """A worker's batches until the next update."""

    micro_batches: tuple[MicroBatchPlan, ...] = (MicroBatchPlan(),)  # each may be split again
    total_samples: int | None = None  # of all workers; None: unknown
    is_oversized: bool = False  # has an unsplit batch above `max_micro_batch_size`
    has_logical_workers: bool = False  # of logical workers, which stay separate micro-batches

    @functools.cached_property
    def num_steps(self) -> int:
        return self.micro_batches[-1].step_index + 1

    @functools.cached_property
    def num_samples(self) -> float:
        """Samples of this worker, without repeated ones."""
        return sum(each.num_samples or 0 for each in self.micro_batches)


def part_bounds(
    total: int, num_parts: int, index: int, shares: tuple[float, ...] | None = None
) -> tuple[int, int]:
    """Return one of `num_parts` parts of `total` samples as (start, stop), sized by its share.

    If there are fewer samples than parts, parts have samples in common.

    >>> [part_bounds(5, 3, i) for i in range(3)]
    [(0, 2), (2, 4), (4, 5)]
    >>> [part_bounds(2, 3, i) for i in range(3)]
    [(0, 1), (1, 2), (0, 1)]
    >>> [part_bounds(8, 2, i, shares=(3.0, 1.0)) for i in range(2)]
    [(0, 6), (6, 8)]
    """
    if total < num_parts:
        first = index % total
        return first, first + 1
    if shares is not None:
        bounds = _bounds_by_shares(total, shares)
        return bounds[index], bounds[index + 1]
    size, extra = divmod(total, num_parts)
    first = index * size + min(index, extra)
    return first, first + size + (index < extra)


@functools.lru_cache(maxsize=256)
def _bounds_by_shares(total: int, shares: tuple[float, ...]) -> list[int]:
    bounds = [0]
    for rank, sum_so_far in enumerate(itertools.accumulate(shares), start=1):
        num_later = len(shares) - rank
        ideal = round(total * sum_so_far / sum(shares))
        bounds.append(min(max(ideal, bounds[-1] + 1), total - num_later))
    return bounds
