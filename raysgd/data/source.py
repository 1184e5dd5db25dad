"""Where the batches of an epoch come from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["Source", "UnsharedSource"]


class Source:
    """Where the batches of an epoch come from, and where in it a step stands.

    An offset is a position in an epoch. For a loader that is shared out it counts the samples of
    all workers (their batches, for a ``tf.data.Dataset``); for any other, this worker's batches.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    sharded = False

    def __len__(self) -> int:
        """Batches of this worker in an epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this worker's batches, as user code does that loops by itself."""
        return iter(self.loader)

    def __getattr__(self, name: str) -> Any:
        """Give access to the attributes of the user's loader, ``dataset`` and the like."""
        if name == "loader":  # not set yet: while unpickling
            raise AttributeError(name)
        return getattr(self.loader, name)

    def batches(self, epoch: int, offset: int, num_steps: int | None = None) -> Iterator[Any]:
        """Iterate over this worker's batches of `epoch` from `offset` on."""
        raise NotImplementedError

    def steps_left(self, offset: int) -> int | None:
        """Return how many steps follow `offset` in an epoch; None where that is unknown."""
        raise NotImplementedError

    def offset_after(self, offset: int, num_steps: int) -> int:
        """Return the offset `num_steps` steps after `offset`."""
        raise NotImplementedError

    def num_samples(self, start: int, stop: int) -> int | None:
        """Return how many samples lie between two places; None where that is unknown."""
        return stop - start

    def num_taken(self, offset: int, num_steps: int) -> int | None:
        """Return how many samples this worker takes at so many steps; None where unknown."""
        return None

    def has_order(self, epoch: int) -> bool:
        """Whether the order of an epoch has been drawn, and is kept."""
        return False

    def order(self, epoch: int) -> Any:
        """Return the order of an epoch."""
        raise NotImplementedError

    def take_order(self, epoch: int, order: Any) -> None:
        """Go by another worker's order of an epoch."""
        raise NotImplementedError

    def order_digest(self, epoch: int) -> int | None:
        """Return a number from 0 to 2**62 - 1 that tells orders of an epoch apart.

        None where the order follows from the seed and the epoch in any case, on all workers alike.
        """
        return None

    def reshard(self, world_size: int, rank: int, batch_share: int | None) -> None:
        """Share the epoch out anew; `batch_share` is the new share of ``config[BATCH_SIZE]``."""

    def batching(self) -> tuple[int, bool] | None:
        """Return a worker's samples at a step, and whether they follow ``config[BATCH_SIZE]``.

        None where the loader makes its batches by itself.
        """
        return None

    def set_batch_size(self, size: int, follows_share: bool) -> None:
        """Make batches as another worker does, whose `batching` this is."""

    def reseed(self, seed: int) -> None:
        """Let the order of the epochs follow from `seed`."""

    @property
    def own_seed(self) -> int | None:
        """The seed in use where the user gave the loader a generator; None where none was given."""
        return None

    def take_own_seed(self, seed: int) -> None:
        """Go by another worker's, or a saved, `own_seed`, until `reseed` is called."""

    def close_workers(self) -> None:
        """Let go of the loader's worker processes; the next iteration starts others."""

    def fingerprint(self) -> str:
        """Return what has to be the same on all workers, as text."""
        return ""

    def describe(self) -> str:
        """Say what there is to iterate over, for messages."""
        return repr(self.loader)


class UnsharedSource(Source):
    """A loader that is left as it is: an iterable, or one with a batch sampler of its own."""

    def batches(self, epoch: int, offset: int, num_steps: int | None = None) -> Iterator[Any]:
        """Iterate over the loader; what lies before `offset` is read and passed over."""
        set_epoch = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        iterator: Iterator[Any] = iter(self.loader)
        for _ in range(offset):
            if next(iterator, self) is self:
                break
        if num_steps is None:
            return iterator
        return (batch for _, batch in zip(range(num_steps), iterator, strict=False))

    def steps_left(self, offset: int) -> int | None:
        """Return the number of batches after `offset`, where the loader has a length."""
        try:
            return max(0, len(self.loader) - offset)
        except TypeError:
            return None

    def offset_after(self, offset: int, num_steps: int) -> int:
        """Count batches."""
        return offset + num_steps
