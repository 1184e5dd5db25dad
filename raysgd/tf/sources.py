"""``tf.data`` pipelines, shared out over the workers batch by batch.

A pipeline is read by every worker, as it is with ``AutoShardPolicy.DATA``: at each step the workers
together take its next batches, rank 0 the first of them, rank 1 the next. So a step of two workers
is the same set of samples as two steps of one, and what is left of an epoch is a plain count.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from raysgd.data.source import Source, UnsharedSource

__all__ = ["DatasetSource", "num_rows", "plain_spec"]


def num_rows(batch: Any) -> int:
    """Return how many samples a batch has: the length of its first part."""
    return int(tf.nest.flatten(batch)[0].shape[0])


class DatasetSource(Source):
    """A ``tf.data.Dataset`` of batches, shared out over the workers.

    Args:
        loader: the data set; the same on all workers.
        training: whether every worker gets a batch at every step.
        world_size: number of workers.
        rank: this worker's rank.
        splits: whether a batch of the data set is one of the whole group, which is split, and not
            one of a worker.
    """

    sharded = True

    def __init__(
        self, loader: Any, *, training: bool, world_size: int, rank: int, splits: bool = False
    ) -> None:
        super().__init__(loader)
        self._training, self._splits = training, splits
        self._world_size, self._rank = world_size, rank
        self._num_begun = 0
        self._sizes: dict[int, int] = {}
        total = int(loader.cardinality().numpy())
        self._total = total if total >= 0 else None

    @property
    def _group(self) -> int:
        return 1 if self._splits else self._world_size

    def __len__(self) -> int:
        """Batches of this worker in an epoch."""
        left = self.steps_left(0)
        if left is None:
            raise TypeError("This data set does not know how many batches it has.")
        return left

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this worker's batches."""
        return self._shared(iter(self.loader), 0)

    def reshard(self, world_size: int, rank: int, batch_share: int | None) -> None:
        """Share the epoch out anew."""
        self._world_size, self._rank = world_size, rank

    def steps_left(self, offset: int) -> int | None:
        """Return how many steps follow `offset`; None where the data set does not know."""
        if self._total is None:
            return None
        return max(0, -(-(self._total - offset) // self._group))

    def offset_after(self, offset: int, num_steps: int) -> int:
        """Count batches of the data set."""
        after = offset + num_steps * self._group
        return after if self._total is None else min(after, self._total)

    def num_samples(self, start: int, stop: int) -> int | None:
        """Return how many samples lie between two places of the epoch that was read last."""
        return sum(self._sizes.get(index, 0) for index in range(start, stop))

    def batches(self, epoch: int, offset: int, num_steps: int | None = None) -> Iterator[Any]:
        """Iterate over this worker's batches of `epoch` from `offset` on.

        A data set that shuffles itself anew does so with each iteration: those of the epochs
        before are begun, so that a new process gets the order that an older one had.
        """
        if self._training:
            while self._num_begun < epoch:
                iter(self.loader)
                self._num_begun += 1
            self._num_begun += 1
        shared = self._shared(iter(self.loader), offset)
        return shared if num_steps is None else self._first(shared, offset, num_steps)

    def _first(self, shared: Iterator[Any], offset: int, num_steps: int) -> Iterator[Any]:
        """Yield what this worker has of the next `num_steps` steps of the group."""
        count = num_steps
        if not self._training and self._total is not None:
            after = self.offset_after(offset, num_steps)
            own = range(offset + (0 if self._splits else self._rank), after, self._group)
            count = min(num_steps, len(own))
        return itertools.islice(shared, count)

    def _shared(self, stream: Iterator[Any], offset: int) -> Iterator[Any]:
        index = 0
        for batch in itertools.islice(stream, offset):
            self._sizes[index] = num_rows(batch)
            index += 1
        while group := list(itertools.islice(stream, self._group)):
            for batch in group:
                self._sizes[index] = num_rows(batch)
                index += 1
            own = self._own_part(group)
            if own is not None:
                yield own

    def _own_part(self, group: list[Any]) -> Any:
        """Return this worker's part of what the group takes at a step; None where it has none."""
        sizes = {num_rows(batch) for batch in group}
        if len(group) == self._world_size and (len(sizes) == 1 or not self._training):
            return group[self._rank]
        if not self._training and not self._splits:
            return group[self._rank] if self._rank < len(group) else None
        rows = group[0] if len(group) == 1 else tf.nest.map_structure(_joined, *group)
        return _part(rows, self._rank, self._world_size, self._training)

    def reads(self) -> Any:
        """Return what a batch looks like: ``tf.TensorSpec`` in its structure."""
        return self.loader.element_spec

    def fingerprint(self) -> str:
        """Return what has to be the same on all workers."""
        return f"{self._total} batches of {self.loader.element_spec}"

    def describe(self) -> str:
        """Say what there is."""
        return f"{self.loader!r}, shared out over {self._world_size} workers"


def plain_spec(loader: UnsharedSource) -> Any:
    """Return what the batches of an iterable look like, from its first one."""
    for batch in loader.loader:
        return tf.nest.map_structure(lambda x: tf.TensorSpec.from_tensor(_tensor(x)), batch)
    return None


def _tensor(value: Any) -> Any:
    return tf.convert_to_tensor(value)


def _joined(*columns: Any) -> Any:
    return tf.concat(columns, 0)


def _part(rows: Any, rank: int, world_size: int, training: bool) -> Any:
    total = num_rows(rows)
    if total < world_size:
        if not training and rank >= total:
            return None
        first = rank % total
        return tf.nest.map_structure(lambda leaf: leaf[first : first + 1], rows)
    share, extra = divmod(total, world_size)
    first = rank * share + min(rank, extra)
    stop = first + share + (rank < extra)
    return tf.nest.map_structure(lambda leaf: leaf[first:stop], rows)
