"""Data loaders of training functions: partitioned across the workers, batches on the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from raysgd.data.source import own_split
from raysgd.torch.batches import move_to_device
from raysgd.torch.loading import PartitionedLoader, makes_own_batches, why_whole
from raysgd.torch.orders import is_plain_shuffle
from raysgd.torch.stream_reading import changed

logger = logging.getLogger(__name__)


class PreparedLoader(DataLoader[Any]):
    """Iterates over this worker's part of another loader, and moves the batches to a device.

    All other attributes, such as ``dataset`` and ``sampler``, come from the wrapped loader.
    `full_size` is the number of workers of the full group, which sets the global batch size. None
    scales the batch with the group. `weigh` receives the loss weight of each batch.
    `num_collectives` returns the number of collectives so far; None if unknown.
    """

    _loader: DataLoader[Any]

    def __init__(
        self,
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
        num_collectives: Callable[[], int | None] = lambda: None,
    ) -> None:
        while isinstance(loader, PreparedLoader):
            loader = loader._loader
        full_size = full_size or world_size
        self._shared: _SharedSampler | None = None
        self._device, self._weigh = device, weigh
        self._ahead = ahead and device is not None and device.type == "cuda"
        if is_shared := full_size > 1 and _can_share(loader):
            loader = changed(loader, pin_memory=loader.pin_memory or self._ahead)
        self.__dict__.update(loader.__dict__)
        self._loader = loader
        if not is_shared:
            return
        if loader.generator is not None:
            seed = loader.generator.initial_seed() % 2**31
        source = PartitionedLoader(
            loader,
            training=True,
            world_size=world_size,
            rank=rank,
            seed=seed,
            full_size=full_size,
        )
        source.set_shares(shares if world_size == len(shares or ()) else None)
        self.sampler = self._shared = _SharedSampler(source, seed, num_collectives)
        if loader.batch_size is not None:
            self.batch_sampler = BatchSampler(self.sampler, loader.batch_size, loader.drop_last)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # bypass the guards of DataLoader

    def __len__(self) -> int:
        return len(self._loader if self._shared is None else self._shared.source)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        shared = self._shared
        epoch = 0 if shared is None else shared.begin()
        batches = iter(self._loader) if shared is None else shared.source.batches(epoch, offset=0)
        if (device := self._device) is not None and self._ahead:
            batches = _moved_ahead(batches, device)
        elif device is not None:
            whole = batches
            batches = (move_to_device(batch, device) for batch in whole)
        if shared is not None and self._weigh is not None:
            batches = _weighed(batches, shared.source, self._weigh)
        return batches if shared is None else shared.counted(batches, epoch)


def _weighed(
    batches: Iterator[Any], source: PartitionedLoader, weigh: Callable[[float], None]
) -> Iterator[Any]:
    try:
        for step, batch in enumerate(batches):
            plan = source.plan(source.offset_after(0, step), 1, in_parts=False)
            weigh(plan.samples * source.partition.world_size / (plan.total or 1))
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
    """Offers the epoch of a `PartitionedLoader`, and this worker's indices, like PyTorch does."""

    def __init__(
        self, source: PartitionedLoader, seed: int, num_collectives: Callable[[], int | None]
    ) -> None:
        self._order = source.order_sampler
        size, rank = source.partition.world_size, source.partition.rank
        shuffle = is_plain_shuffle(self._order)
        super().__init__(self._order, size, rank, shuffle=shuffle, seed=seed)
        self.source = source
        self.dataset = source.loader.dataset
        self._num_collectives = num_collectives
        self._last: tuple[int, int | None] = -1, None
        """Arguments of `_count` for the last complete pass."""

    @property
    def epoch(self) -> int:
        """The epoch of the next pass. The epoch of the user's sampler takes precedence."""
        own = getattr(self._order, "epoch", None) if hasattr(self._order, "set_epoch") else None
        return own if isinstance(own, int) else self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def set_epoch(self, epoch: int) -> None:
        self._epoch, self._last = epoch, (-1, None)
        if hasattr(self._order, "set_epoch"):
            self._order.set_epoch(epoch)

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.source.partition.batches())

    def __iter__(self) -> Iterator[Any]:
        epoch = self.begin()
        return self.counted(self.source.indices(epoch), epoch)

    def begin(self) -> int:
        """Return the epoch of a new pass."""
        self._count(*self._last)
        return self.epoch

    def counted(self, items: Iterator[Any], epoch: int) -> Iterator[Any]:
        """Yield the items of a pass. The next pass has the next epoch if this one counts.

        One worker alone may look at batches, and all workers need the same epoch. Therefore, a pass
        counts if the workers communicate during it. If they communicated before, they may also do
        it between its last item and the next pass. Without a count of collectives, a pass counts
        from its second item, or at its end.
        """
        begun, is_over = self._num_collectives(), False
        try:
            for item in items:
                yield item
                self._count(epoch, begun)
            is_over = True
        finally:
            if is_over or begun or self.source.partition.world_size == 1:
                self._count(epoch, begun)
            if is_over and begun and self.epoch == epoch:
                self._last = epoch, begun

    def _count(self, epoch: int, begun: int | None) -> None:
        has_trained = begun is None or begun < (self._num_collectives() or 0)
        if self.epoch == epoch and (has_trained or self.source.partition.world_size == 1):
            self.set_epoch(epoch + 1)


def _can_share(loader: DataLoader[Any]) -> bool:
    if makes_own_batches(loader) or own_split(loader) is not None:
        return False
    if reason := why_whole(loader):
        logger.warning(
            "Every worker reads all data of a loader, because %s. Select the data by "
            "train.world_rank(), and pass add_dist_sampler=False to prepare_data_loader().",
            reason,
        )
    return not reason
