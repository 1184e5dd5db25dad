"""Where the batches of an epoch come from."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from raysgd.data.partition import EpochPartition, MicroBatch, micro_batches_of

__all__ = ["BatchSource", "PartitionedSource", "own_split"]


def own_split(loader: Any) -> tuple[Any, Any] | None:
    """Return the world size and the rank by which a loader selects its part itself.

    None if neither the loader nor what it draws from has them. The rank may be None.
    """
    batches = getattr(loader, "batch_sampler", None)
    sources = [getattr(loader, name, None) for name in ("dataset", "sampler")]
    for part in (loader, *sources, batches, getattr(batches, "sampler", None)):
        if hasattr(part, "num_replicas"):  # the name that PyTorch's DistributedSampler uses
            return part.num_replicas, getattr(part, "rank", None)
        # what split_dataset_by_node of Hugging Face sets; there is no public name for it
        split: Any = getattr(part, "_distributed", None)
        if hasattr(split, "world_size"):
            return split.world_size, split.rank
    return None


class BatchSource:
    """A loader as a worker reads it. This one is left as it is; what is shared out derives from it.

    An offset is a position in an epoch. For a loader that is shared out it counts the samples of
    all workers (their batches, for a ``tf.data.Dataset``); here it counts this worker's batches.

    Args:
        loader: what the user registered.
        has_length: False where its ``len`` is a guess.
        by_user: whether each worker reads a part that the user's code selects.
        why_whole: why raysgd cannot partition it.
    """

    sharded = False
    keeps_step = False
    """Whether a step is the same samples with any number of workers."""
    shuffles = False
    """Whether the order of an epoch is known to be one that was drawn."""
    partitioned_by = ""
    """Who gives each worker a part of its own; empty if each reads all of the loader."""

    def __init__(
        self, loader: Any, has_length: bool = True, by_user: bool = False, why_whole: str = ""
    ) -> None:
        self.loader = loader
        if by_user or own_split(loader) is not None:
            self.partitioned_by = self.partitioned_by or "your code"
        self.why_whole = why_whole
        self._has_length = has_length
        self._limit: float | None = None
        self._max_steps: int | None = None

    def __len__(self) -> int:
        """Batches of this worker in an epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this worker's batches, as user code does that loops by itself."""
        return iter(self._part(None))

    def _part(self, epoch: int | None) -> Any:
        """Return what this worker iterates over; with `epoch`, in the order of that epoch."""
        set_epoch = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None and epoch is not None:
            set_epoch(epoch)
        return self.loader

    def __getattr__(self, name: str) -> Any:
        """Give access to the attributes of the user's loader, ``dataset`` and the like."""
        if name == "loader":  # not set yet: while unpickling
            raise AttributeError(name)
        return getattr(self.loader, name)

    # ---- reading

    def batches(
        self, epoch: int, offset: int, num_steps: int | None = None, in_parts: bool = False
    ) -> Iterator[Any]:
        """Iterate over this worker's batches of `epoch` from `offset` on.

        What lies before `offset` in a loader that is left as it is, is read and passed over. With
        `in_parts`, batches that are larger than where the group has its full size come in parts.
        """
        iterator: Iterator[Any] = iter(self._part(epoch))
        if self._max_steps is not None:
            iterator = itertools.islice(iterator, self._max_steps)
        for _ in itertools.islice(iterator, offset):
            pass
        return iterator if num_steps is None else itertools.islice(iterator, num_steps)

    def limit(self, limit: float | None) -> bool:
        """Let an epoch end after so many steps, or a float: such a share; say whether that is new.

        Raises:
            ValueError: if it is a share, and nobody knows of how many.
        """
        if limit == self._limit and type(limit) is type(self._limit):
            return False
        self._limit = limit
        self.end_after(None)
        if isinstance(limit, float):
            steps = self.steps_left(0)
            if steps is None:
                raise ValueError(
                    f"A limit of {limit} is a share of the loader's batches, and a "
                    f"{type(self.loader).__name__} does not say how many it has. Give a number of "
                    "batches, an int."
                )
            limit = max(1, int(limit * steps))
        self.end_after(limit)
        return True

    def end_after(self, steps: int | None) -> None:
        """Let an epoch end after so many steps; None: after all."""
        self._max_steps = steps

    def places(self, offset: int, num_steps: int, in_parts: bool) -> Sequence[MicroBatch] | None:
        """Return the places of this worker's batches, or their parts, in a group of steps.

        Asked for when the first of them has been read. None where their sizes are unknown.
        """
        return None

    def places_of_batches(self) -> Iterator[int]:
        """Yield numbers for this worker's batches, which grow in the order of all batches."""
        return itertools.count()

    def steps_left(self, offset: int) -> int | None:
        """Return how many steps follow `offset` in an epoch; None where that is unknown."""
        try:
            if not self._has_length:
                return None
            steps = len(self.loader)
        except TypeError:
            return None
        return max(0, min(steps, self._max_steps or steps) - offset)

    def offset_after(self, offset: int, num_steps: int) -> int:
        """Return the offset `num_steps` steps after `offset`."""
        return offset + num_steps

    def num_samples(self, start: int, stop: int) -> int:
        """Return how many samples lie between two offsets of a loader that is shared out."""
        return stop - start

    def num_taken(self, offset: int, num_steps: int, in_parts: bool = False) -> int | None:
        """Return how many samples this worker takes at so many steps; None where unknown."""
        return None

    def close_workers(self) -> None:
        """Let go of the loader's worker processes; the next iteration starts others."""

    @property
    def can_be_tried(self) -> bool:
        """Whether some batches can be read ahead, without any being missed later."""
        return not isinstance(self.loader, Iterator)

    # ---- what the workers have in common

    def agree_on_order(self, epoch: int, offset: int, registration: Any) -> None:
        """See that all workers share out one order of an epoch from `offset` on.

        Every rank must call it, and then `batches`.

        Raises:
            RuntimeError: if their orders differ.
        """

    def reshard(self, world_size: int, rank: int, batch_share: int | None) -> None:
        """Share the epoch out anew; `batch_share` is the new share of ``config[BATCH_SIZE]``."""

    def batching(self) -> tuple[int, bool] | None:
        """Return a worker's samples at a step, and whether they follow ``config[BATCH_SIZE]``.

        None where the loader makes its batches by itself.
        """
        return None

    def set_batch_size(self, size: int, follows_share: bool) -> None:
        """Make batches as another worker does, whose `batching` this is."""

    def reseed(self, seed: int, own_seed: int | None = None) -> None:
        """Let the order of the epochs follow from `seed`.

        Where the user gave the loader a generator it follows from that, or from the `own_seed` of
        another worker or of a saved state.
        """

    @property
    def own_seed(self) -> int | None:
        """The seed in use where the user gave the loader a generator; None where none was given."""
        return None

    def fingerprint(self) -> str:
        """Return what has to be the same on all workers, as text."""
        return ""

    @property
    def global_batch(self) -> int | None:
        """Samples of a step of the group; None where it is not shared out sample by sample."""
        return None

    def describe(self) -> str:
        """Say what there is to iterate over, for messages."""
        kind: Any = type(self.loader)
        if kind.__repr__ is not object.__repr__:
            return repr(self.loader)
        dataset = getattr(self.loader, "dataset", None)
        of = "" if dataset is None else f" of {type(dataset).__name__}"
        return f"{kind.__name__}{of}"


class PartitionedSource(BatchSource):
    """Samples that are shared out over the workers by a :class:`EpochPartition`.

    Args:
        loader: what the user registered.
        shard: this worker's part.
        follows_share: whether the batch size is this worker's share of a global one.
        global_batch: that one, where steps keep their size.
    """

    sharded = True
    partitioned_by = "raysgd"

    def __init__(
        self,
        loader: Any,
        shard: EpochPartition,
        follows_share: bool,
        global_batch: int | None = None,
    ) -> None:
        super().__init__(loader)
        self._shard = shard
        self._given_batch = global_batch
        self.set_batch_size(shard.batch_size, follows_share)

    @property
    def shard(self) -> EpochPartition:
        """This worker's part."""
        return self._shard

    @property
    def batch_size(self) -> int:
        """Samples that this worker takes at a step of the full group."""
        return self._shard.batch_size

    @property
    def keeps_step(self) -> bool:  # type: ignore[override]
        """Whether a step is the same samples with any number of workers."""
        return self._shard.full_size is not None

    @property
    def global_batch(self) -> int:
        """Samples of a step of the group."""
        return self._shard.stride

    def __len__(self) -> int:
        """Batches of this worker in an epoch."""
        return sum(1 for _ in self.shard.batches())

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this worker's batches of the first epoch."""
        return self.batches(0, 0)

    def places(self, offset: int, num_steps: int, in_parts: bool) -> Sequence[MicroBatch]:
        """Return the places of this worker's batches, or their parts, in a group of steps."""
        shard = self.shard
        sizes = tuple(shard.sizes(offset, num_steps))
        return micro_batches_of(sizes, shard.world_size, shard.rank, shard.at_once, in_parts)

    def places_of_batches(self) -> Iterator[int]:
        """Yield where this worker's batches begin, in the order of an epoch."""
        return (start for start, _ in self.shard.batches())

    def steps_left(self, offset: int) -> int:
        """Return how many steps follow `offset`."""
        return self.shard.num_steps(offset)

    def offset_after(self, offset: int, num_steps: int) -> int:
        """Return the offset `num_steps` steps after `offset`."""
        return self.shard.offset_after(offset, num_steps)

    def num_samples(self, start: int, stop: int) -> int:
        """Return how many samples lie between two offsets, but for those that are dropped."""
        # the offset at the end of an epoch lies behind them
        return min(stop, self.shard.end(start)) - start

    def num_taken(self, offset: int, num_steps: int, in_parts: bool = False) -> int:
        """Return how many samples this worker takes at so many steps."""
        return self.shard.num_taken(offset, num_steps, in_parts)

    def reshard(self, world_size: int, rank: int, batch_share: int | None) -> None:
        """Share the epoch out anew."""
        self._shard = replace(self._shard, world_size=world_size, rank=rank)
        if self._follows_share and batch_share is not None and not self.keeps_step:
            self.set_batch_size(batch_share, follows_share=True)

    def batching(self) -> tuple[int, bool]:
        """Return a worker's samples at a step, and whether they follow ``config[BATCH_SIZE]``."""
        return self.batch_size, self._follows_share

    def set_batch_size(self, size: int, follows_share: bool) -> None:
        """Make batches as another worker does, whose `batching` this is."""
        given = self._given_batch if follows_share else None
        self._shard = replace(self._shard, batch_size=size, global_batch=given)
        self._follows_share = follows_share

    def end_after(self, steps: int | None) -> None:
        """Let an epoch end after so many steps; None: after all."""
        self._shard = replace(self._shard, max_steps=steps)

    def describe(self) -> str:
        """Say how many samples are shared out among how many workers."""
        shard = self.shard
        size = shard.full_size or shard.world_size
        return f"{shard.total} samples, batch size {shard.batch_size} on each of {size} workers"
