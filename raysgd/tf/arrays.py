"""Arrays and items, shared out over the workers sample by sample."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from raysgd.data import Dataset
from raysgd.data.shard import Shard
from raysgd.data.source import Source

__all__ = ["ArraySource", "ItemSource", "is_arrays"]


def is_arrays(data: Any) -> bool:
    """Whether `data` is an array, or a tuple or dict of them."""
    leaves = tf.nest.flatten(data) if isinstance(data, tuple | dict) else [data]
    return bool(leaves) and all(hasattr(leaf, "__array__") for leaf in leaves)


class ArraySource(Source):
    """Arrays, shared out over the workers sample by sample.

    Args:
        arrays: an array or a nest of arrays, all of the same length.
        training: whether every worker gets a batch at every step.
        batch_size: samples of a worker's batch.
        shuffle: whether to shuffle them anew in each epoch.
        follows_share: whether the batch size is this worker's share of a global one.
    """

    sharded = True

    def __init__(
        self,
        arrays: Any,
        *,
        training: bool,
        world_size: int,
        rank: int,
        batch_size: int,
        shuffle: bool,
        seed: int,
        follows_share: bool = False,
    ) -> None:
        super().__init__(arrays)
        self._arrays = tf.nest.map_structure(np.asarray, arrays)
        if any(leaf.ndim == 0 for leaf in tf.nest.flatten(self._arrays)):
            raise ValueError(
                "Arrays of a data set have their samples along the first dimension, and one has "
                "no dimension. Register arrays of shape (samples, ...)."
            )
        lengths = {len(leaf) for leaf in tf.nest.flatten(self._arrays)}
        if len(lengths) != 1:
            raise ValueError(f"Arrays of one data set must have one length, not {sorted(lengths)}.")
        (self._total,) = lengths
        self._training, self._batch_size = training, batch_size
        self._shuffle, self._seed = shuffle and training, seed
        self._size_and_rank = (world_size, rank)
        self._follows_share = follows_share

    @property
    def _shard(self) -> Shard:
        world_size, rank = self._size_and_rank
        return Shard(
            total=self._total,
            batch_size=self._batch_size,
            world_size=world_size,
            rank=rank,
            even=self._training,
        )

    def __len__(self) -> int:
        """Batches of this worker in an epoch."""
        return sum(1 for _ in self._shard.batches())

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this worker's batches of the first epoch."""
        return self.batches(0, 0)

    def reshard(self, world_size: int, rank: int, batch_share: int | None) -> None:
        """Share the epoch out anew."""
        self._size_and_rank = (world_size, rank)
        if self._follows_share and batch_share is not None:
            self._batch_size = batch_share

    def reseed(self, seed: int) -> None:
        """Let the order follow from `seed`."""
        self._seed = seed

    def steps_left(self, offset: int) -> int:
        """Return how many steps follow `offset`."""
        return self._shard.num_steps(offset)

    def offset_after(self, offset: int, num_steps: int) -> int:
        """Return the offset `num_steps` steps after `offset`."""
        return self._shard.offset_after(offset, num_steps)

    def num_taken(self, offset: int, num_steps: int) -> int:
        """Return how many samples this worker takes at so many steps."""
        return self._shard.num_taken(offset, num_steps)

    def batches(self, epoch: int, offset: int, num_steps: int | None = None) -> Iterator[Any]:
        """Iterate over this worker's batches of `epoch` from `offset` on."""
        order = np.arange(self._total)
        if self._shuffle:
            order = np.random.default_rng([self._seed, epoch]).permutation(self._total)
        for start, stop in self._shard.batches(offset, num_steps):
            yield self._fetched(order[start:stop])

    def _fetched(self, rows: Any) -> Any:
        return tf.nest.map_structure(lambda leaf: tf.convert_to_tensor(leaf[rows]), self._arrays)

    def reads(self) -> Any:
        """Return what a batch looks like."""
        return tf.nest.map_structure(
            lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), self._arrays
        )

    def fingerprint(self) -> str:
        """Return what has to be the same on all workers: the sizes, and the samples at the ends."""
        digest = hashlib.sha256()
        for leaf in tf.nest.flatten(self._arrays):
            digest.update(np.ascontiguousarray(leaf[[0, -1]]).tobytes() if len(leaf) else b"")
        content = digest.hexdigest()[:8]
        return f"{self._total} samples, batch size {self._batch_size}, arrays {content}"

    def describe(self) -> str:
        """Say how many samples are shared out among how many workers."""
        return (
            f"{self._total} samples, batch size {self._batch_size} on each of "
            f"{self._size_and_rank[0]} workers"
        )


class ItemSource(ArraySource):
    """A :class:`raysgd.data.Dataset`: items that each worker fetches for itself."""

    def __init__(self, dataset: Dataset, *, world_size: int, rank: int) -> None:
        super().__init__(
            np.arange(len(dataset)),
            training=True,
            world_size=world_size,
            rank=rank,
            batch_size=dataset.batch_size,
            shuffle=False,
            seed=0,
        )
        self._dataset = dataset

    def _fetched(self, rows: Any) -> Any:
        samples = [
            tf.nest.map_structure(tf.convert_to_tensor, sample)
            for sample in self._dataset.fetch(rows.tolist())
        ]
        # a sample with a dimension is a small batch itself
        return tf.nest.map_structure(
            lambda *rows: tf.concat(rows, 0) if rows[0].shape.rank else tf.stack(rows), *samples
        )

    def reads(self) -> Any:
        """Return nothing: what a batch looks like is known when one is fetched."""
        return None
