"""Data loaders of training functions: partitioned across the workers, batches on the device."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from raysgd.data.partition import EpochPartition, part_of
from raysgd.torch.batches import move_to_device
from raysgd.torch.loading import (
    changed,
    drawn_order,
    is_plain_shuffle,
    makes_own_batches,
    picked,
)

logger = logging.getLogger(__name__)


def prepared_loader(
    loader: DataLoader[Any],
    *,
    world_size: int,
    rank: int,
    device: torch.device | None,
    ahead: bool,
    seed: int,
    full_size: int | None = None,
    shares: tuple[float, ...] | None = None,
    weigh: Callable[[float], None] | None = None,
) -> PreparedLoader:
    """Return a loader that gives this worker its part of the data, on its device.

    `full_size` is the number of workers of the full group, which sets the global batch size. None
    scales the batch with the group. `weigh` receives the loss weight of each batch.
    """
    while isinstance(loader, PreparedLoader):
        loader = loader._loader
    full_size = full_size or world_size
    if full_size > 1 and _can_share(loader):
        if world_size < full_size and loader.batch_size is not None:
            logger.warning(
                "A loader gives each of %d workers up to %d samples per batch instead of %d, so "
                "that steps keep the size of %d workers. For smaller steps, pass "
                'ElasticConfig(global_batch="scale").',
                world_size,
                -(-full_size * loader.batch_size // world_size),
                loader.batch_size,
                full_size,
            )
        if isinstance(loader.sampler, RandomSampler) and loader.generator is not None:
            seed = loader.generator.initial_seed() % 2**31
        sampler = _SharedSampler(loader, world_size, rank, seed, full_size, shares)
        pin = ahead and device is not None and device.type == "cuda"
        settings: dict[str, Any] = {"sampler": sampler, "pin_memory": loader.pin_memory or pin}
        if loader.batch_size is not None:
            batches = _SharedBatches(sampler, sampler.batch_size, loader.drop_last)
            settings["batch_sampler"] = batches
        loader = changed(loader, **settings)
    return PreparedLoader(loader, device, ahead, weigh)


class PreparedLoader(DataLoader[Any]):
    """Iterates over another loader, and moves its batches to a device.

    All other attributes, such as ``dataset`` and ``sampler``, are those of that loader.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        device: torch.device | None,
        ahead: bool,
        weigh: Callable[[float], None] | None = None,
    ) -> None:
        self.__dict__.update(loader.__dict__)
        self._loader = loader
        self._weigh = weigh
        self._device = device
        self._ahead = ahead and device is not None and device.type == "cuda"

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # bypass the guards of DataLoader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches: Iterator[Any] = iter(self._loader)
        if (device := self._device) is not None and self._ahead:
            batches = _moved_ahead(batches, device)
        elif device is not None:
            whole = batches
            batches = (move_to_device(batch, device) for batch in whole)
        sampler = self._loader.sampler
        if self._weigh is None or not isinstance(sampler, _SharedSampler):
            return batches
        return _weighed(batches, sampler, self._weigh)


def _weighed(
    batches: Iterator[Any], sampler: _SharedSampler, weigh: Callable[[float], None]
) -> Iterator[Any]:
    try:
        for batch, share in zip(batches, sampler.shares(), strict=False):
            weigh(share)
            yield batch
    finally:
        weigh(1.0)


def _moved_ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Move each batch on a separate CUDA stream while the previous one is in use."""
    stream = torch.cuda.Stream(device)

    def fetch() -> Any:
        batch = next(batches, batches)
        if batch is batches:
            return batches
        # The copy may reuse the memory of a batch that queued steps still read.
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            return move_to_device(batch, device)

    coming = fetch()
    while coming is not batches:
        torch.cuda.current_stream(device).wait_stream(stream)
        batch, coming = coming, fetch()
        yield batch


class _SharedSampler(DistributedSampler[Any]):
    """This worker's part of the indices of another sampler.

    Every worker draws the whole order from the same random numbers. An `EpochPartition` selects
    this worker's part of each step.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        num_replicas: int,
        rank: int,
        seed: int,
        full_size: int,
        shares: tuple[float, ...] | None,
    ) -> None:
        given: Any = loader.sampler
        self._given = given
        super().__init__(given, num_replicas, rank, shuffle=is_plain_shuffle(given), seed=seed)
        self.dataset = loader.dataset
        # Without a batch size, each item of the loader is a batch and cannot become larger.
        self._batch_size = loader.batch_size or 1
        self._full_size = num_replicas if loader.batch_size is None else full_size
        self._drops_last = loader.drop_last
        self._shares = shares if num_replicas == len(shares or ()) else None

    @property
    def epoch(self) -> int:
        """The epoch of the next pass. The epoch of the user's sampler takes precedence."""
        own = getattr(self._given, "epoch", None) if hasattr(self._given, "set_epoch") else None
        return own if isinstance(own, int) else self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if hasattr(self._given, "set_epoch"):
            self._given.set_epoch(epoch)

    @property
    def _partition(self) -> EpochPartition:
        return EpochPartition(
            len(self._given),
            self._batch_size,
            self.num_replicas,
            self.rank,
            drop_last=self._drops_last,
            full_size=self._full_size,
            shares=self._shares,
        )

    def shares(self) -> Iterator[float]:
        """Yield the weight of each batch's mean in the mean over the workers."""
        for size in self._partition.sizes(0):
            first, stop = part_of(size, self.num_replicas, self.rank, self._shares)
            counts = self.rank < size  # other workers repeat a sample
            yield (stop - first) * counts * self.num_replicas / size

    @property
    def batch_size(self) -> int:
        """Samples of this worker in a full step."""
        first, stop = part_of(self._partition.stride, self.num_replicas, self.rank, self._shares)
        return stop - first

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self._partition.batches())

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(self.batches())

    def batches(self) -> Iterator[list[Any]]:
        epoch = self.epoch
        order = drawn_order(self._given, self.seed + epoch)
        self.set_epoch(epoch + 1)  # holds unless the user sets another
        return (picked(order, *span) for span in self._partition.batches())

    def num_batches(self) -> int:
        return self._partition.num_steps()


class _SharedBatches(BatchSampler):
    """This worker's batches. With shares, the last one may be the largest."""

    sampler: _SharedSampler

    def __iter__(self) -> Iterator[list[Any]]:
        return self.sampler.batches()

    def __len__(self) -> int:
        return self.sampler.num_batches()


def _can_share(loader: DataLoader[Any]) -> bool:
    if makes_own_batches(loader) or _is_part(loader.sampler):
        return False
    if type(loader).__iter__ is not DataLoader.__iter__:
        reason = f"{type(loader).__name__} has its own __iter__"
    elif not hasattr(loader.sampler, "__len__"):
        reason = f"its {type(loader.sampler).__name__} has no length"
    else:
        return True
    logger.warning(
        "Every worker reads all data of a loader, because %s. Select the data by "
        "train.world_rank(), and pass add_dist_sampler=False to prepare_data_loader().",
        reason,
    )
    return False


def _is_part(sampler: Any) -> bool:
    """Return whether a sampler, or one that it wraps, selects the part of one worker."""
    while sampler is not None:
        if hasattr(sampler, "num_replicas"):  # the name in PyTorch and most other libraries
            return True
        sampler = getattr(sampler, "sampler", None)
    return False
