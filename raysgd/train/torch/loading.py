"""Data loaders of training functions: split across the workers, with batches on the device."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from raysgd.data.partition import EpochPartition, even_part
from raysgd.torch.loading import (
    Order,
    bytes_of,
    changed,
    drawn_order,
    is_plain_shuffle,
    makes_own_batches,
    orders_differ,
    picked,
)
from raysgd.torch.to_device import move_to_device

__all__ = ["PreparedLoader", "prepared_loader"]

logger = logging.getLogger(__name__)


def prepared_loader(
    loader: DataLoader[Any],
    *,
    world_size: int,
    rank: int,
    device: torch.device | None,
    ahead: bool,
    seed: int,
    run: str = "",
    full_size: int | None = None,
    weigh: Callable[[float], None] | None = None,
) -> PreparedLoader:
    """Return a loader that gives this worker its part of the data, on its device.

    Args:
        loader: the user's loader.
        world_size: number of workers that share the loader; 1 does not split it.
        rank: rank of this worker.
        device: device of the batches; None to leave them.
        ahead: whether to move the next batch during the current step.
        seed: seed of the order if the loader shuffles without a generator.
        run: name of the run in the process group, the same on all workers.
        full_size: number of workers of the full group, which sets the global batch size; None to
            scale it with the group.
        weigh: receives the loss weight of each batch.
    """
    full_size = full_size or world_size
    if full_size > 1 and _can_share(loader):
        on_gpu = device is not None and device.type == "cuda"
        if world_size < full_size and loader.batch_size is not None:
            logger.warning(
                "A loader gives this worker up to %d samples a batch, in place of %d, since there "
                "are %d workers of %d: so steps have as many samples as with all of them. "
                'ElasticConfig(global_batch="scale") makes them smaller.',
                -(-full_size * loader.batch_size // world_size),
                loader.batch_size,
                world_size,
                full_size,
            )
        loader = _shared(loader, world_size, rank, seed, run, ahead and on_gpu, full_size)
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
        self._num_passes = 0
        self._own_epoch: int | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # bypass the guards of DataLoader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._advance()
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

    def _advance(self) -> None:
        """Advance the order of a shuffled loader, unless the user sets the epoch."""
        sampler = self._loader.sampler
        if not isinstance(sampler, DistributedSampler):
            return
        found, own = sampler.epoch, self._own_epoch
        if own is None or found != own or type(found) is not type(own):
            self._num_passes = found  # the epoch of the user or the sampler; count from there
        sampler.set_epoch(_Epoch(self._num_passes))
        self._own_epoch = sampler.epoch
        self._num_passes += 1


def _weighed(
    batches: Iterator[Any], sampler: _SharedSampler, weigh: Callable[[float], None]
) -> Iterator[Any]:
    """Announce the loss weight of each batch before yielding it."""
    try:
        for batch, share in zip(batches, sampler.shares(), strict=False):
            weigh(share)
            yield batch
    finally:
        weigh(1.0)


class _Epoch(int):
    """An epoch that `PreparedLoader` set, as opposed to the same number set by the user."""


def _moved_ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Move each batch on a separate CUDA stream while the previous one is in use."""
    stream = torch.cuda.Stream(device)

    def fetch() -> Any:
        batch = next(batches, batches)
        if batch is batches:
            return batches
        with torch.cuda.stream(stream):
            return move_to_device(batch, device)

    coming = fetch()
    while coming is not batches:
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        batch = coming
        _record(batch, current)
        coming = fetch()
        yield batch


def _record(batch: Any, stream: Any) -> None:
    """Keep the memory of the tensors until `stream` no longer uses it."""
    if isinstance(batch, torch.Tensor):
        if batch.is_cuda:
            batch.record_stream(stream)
    elif isinstance(batch, tuple | list | dict):
        for item in batch.values() if isinstance(batch, dict) else batch:
            _record(item, stream)


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
        run: str,
        full_size: int,
    ) -> None:
        given: Any = loader.sampler
        # DistributedSampler shuffles the data set, so it cannot replace a sampler over something
        # else
        self._is_plain = is_plain_shuffle(given) and len(given) == len(loader.dataset)  # type: ignore[arg-type]
        self._given = given
        follows_seed = self._is_plain or type(given) is SequentialSampler
        self._check = None if follows_seed else _OrderCheck(given, num_replicas, rank, run)
        super().__init__(given, num_replicas, rank, shuffle=self._is_plain, seed=seed)
        self.dataset = loader.dataset
        # without a batch size, each item of the loader is a batch and cannot become larger
        self._batch_size = loader.batch_size or 1
        self._full_size = num_replicas if loader.batch_size is None else full_size
        self._drops_last = loader.drop_last

    @property
    def epoch(self) -> int:
        """The epoch, preferably that of the user's sampler."""
        found = getattr(self._given, "epoch", None) if hasattr(self._given, "set_epoch") else None
        return found if isinstance(found, int) else self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, also of the user's sampler if it has one."""
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
        )

    def shares(self) -> Iterator[float]:
        """Yield the weight of each batch's mean in the mean over the workers."""
        for size in self._partition.sizes(0):
            first, stop = even_part(size, self.num_replicas, self.rank)
            counts = self.rank < size  # other workers repeat a sample
            yield (stop - first) * counts * self.num_replicas / size

    @property
    def batch_size(self) -> int:
        """Samples of this worker in a full step."""
        first, stop = even_part(self._partition.stride, self.num_replicas, self.rank)
        return stop - first

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self._partition.batches())

    def __iter__(self) -> Iterator[Any]:
        order = drawn_order(self._given, self.seed + self._epoch, self._is_plain)
        if self._check is not None:
            self._check(self._epoch, order)
        spans = self._partition.batches()
        return itertools.chain.from_iterable(picked(order, *span) for span in spans)


class _OrderCheck:
    """Rejects a pass whose order differs from that of the first worker in the same pass.

    It uses the store of the process group instead of a collective, because a single worker may
    iterate over a loader.
    """

    def __init__(self, sampler: Any, world_size: int, rank: int, run: str) -> None:
        self._sampler = sampler
        self._world_size = world_size
        self._passes: Counter[int] = Counter()
        self._name: str | None = None
        if (store := self._store()) is not None:
            with contextlib.suppress(dist.DistError):
                # Count loaders per kind and length. Ranks that create other kinds of loaders in
                # addition still agree on the number.
                kind = f"{run}/{type(sampler).__name__}/{len(sampler)}"
                number = store.add(f"raysgd/loaders/{kind}/{rank}", 1)
                self._name = f"raysgd/orders/{kind}/{number}"

    def __call__(self, epoch: int, order: Order) -> None:
        """Check the order of a pass.

        Raises:
            RuntimeError: if the order differs.
        """
        epoch = int(epoch)
        self._passes[epoch] += 1
        store = self._store()
        if self._name is None or store is None:
            return
        digest = first = hashlib.sha256(bytes_of(order)).hexdigest().encode()
        # a closed store surfaces at the next collective
        with contextlib.suppress(dist.DistError):
            key = f"{self._name}/{epoch}/{self._passes[epoch]}"
            first = store.compare_set(key, "", digest.decode())
        if first != digest:
            raise orders_differ(epoch, self._sampler, "prepare_data_loader()")

    def _store(self) -> Any:
        """Return the store of the process group if all workers of the group share the loader."""
        if not dist.is_initialized() or dist.get_world_size() != self._world_size:
            return None
        return dist.distributed_c10d._get_default_store()


def _can_share(loader: DataLoader[Any]) -> bool:
    if makes_own_batches(loader) or _is_part(loader.sampler):
        return False
    if type(loader).__iter__ not in (DataLoader.__iter__, PreparedLoader.__iter__):
        _warn(f"{type(loader).__name__} has an __iter__ of its own")
        return False
    if not hasattr(loader.sampler, "__len__"):
        _warn(f"its sampler, of type {type(loader.sampler).__name__}, has no length")
        return False
    return True


def _is_part(sampler: Any) -> bool:
    """Return whether a sampler, or one that it wraps, is for one of several workers."""
    while sampler is not None:
        # PyTorch and most other libraries use this name
        if hasattr(sampler, "num_replicas"):
            return True
        sampler = getattr(sampler, "sampler", None)
    return False


def _warn(reason: str) -> None:
    logger.warning(
        "A loader is not shared out, since %s: every worker goes through all that it gives. Let "
        "it read a part on each worker, by train.world_rank() and train.world_size(), and pass "
        "add_dist_sampler=False to prepare_data_loader().",
        reason,
    )


def _shared(
    loader: DataLoader[Any],
    world_size: int,
    rank: int,
    seed: int,
    run: str,
    pin: bool,
    full_size: int,
) -> DataLoader[Any]:
    """Return a loader with the same settings over this worker's part."""
    while isinstance(loader, PreparedLoader):
        loader = loader._loader
    if isinstance(loader.sampler, RandomSampler) and loader.generator is not None:
        seed = loader.generator.initial_seed() % 2**31
    sampler = _SharedSampler(loader, world_size, rank, seed, run, full_size)
    settings: dict[str, Any] = {"sampler": sampler, "pin_memory": loader.pin_memory or pin}
    if loader.batch_size is not None:
        settings["batch_sampler"] = BatchSampler(sampler, sampler.batch_size, loader.drop_last)
    return changed(loader, **settings)
