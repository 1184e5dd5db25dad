"""Data loaders of training functions: partitioned across the workers, batches on the device."""

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

from raysgd.data.partition import StepLayout
from raysgd.data.source import BatchSource, iterate_once, size_and_rank_of
from raysgd.data.stream import Stream
from raysgd.torch.input.batches import move_to_device
from raysgd.torch.input.loader_copies import clone, without_states
from raysgd.torch.input.orders import is_plain_shuffle, makes_own_batches
from raysgd.torch.input.sources import why_not_partitioned, wrap_loader

logger = logging.getLogger(__name__)

_Partitions = bool | Literal["always"]
_ADVICE = (
    'Pass add_dist_sampler="always" to prepare_data_loader(), which splits any data set, or save '
    "at the end of an epoch, without the state of the loader."
)


def _ignore(weight: float) -> None:
    """Use no weight. Unlike a lambda, it can be pickled."""


class PreparedLoader(DataLoader[Any]):
    """Iterates over this worker's part of another loader, and moves the batches to a device.

    All other attributes, such as ``dataset`` and ``sampler``, come from the wrapped loader.
    `partitions` is the argument ``add_dist_sampler`` of `prepare_data_loader`. `full_world_size` is
    the number of workers of the full group, which sets the global batch size. None scales the batch
    with the group. `set_weight` gets the loss weight of each batch. `num_collectives` returns the
    number of collectives so far; None if unknown.
    """

    _loader: DataLoader[Any]

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        world_size: int,
        rank: int,
        device: torch.device | None,
        prefetch: bool,
        seed: int,
        partitions: _Partitions = True,
        full_world_size: int | None = None,
        shares: tuple[float, ...] | None = None,
        set_weight: Callable[[float], None] = _ignore,
        num_collectives: Callable[[], int | None] = lambda: None,
    ) -> None:
        while isinstance(loader, PreparedLoader):
            loader = loader._loader
        loader, full_world_size = without_states(loader), full_world_size or world_size
        self._epochs = _EpochCounter()
        self._device, self._set_weight, self._world_size = device, set_weight, world_size
        self._prefetches = prefetch and device is not None and device.type == "cuda"
        self._pass_position: tuple[int, int, int | None] | None = None
        """Epoch and offset of the newest pass until its end, and the collectives before it."""
        self._is_partitioned = _can_partition(loader, partitions, full_world_size)
        if self._is_partitioned:
            loader = clone(loader, pin_memory=loader.pin_memory or self._prefetches)
        self.__dict__.update(loader.__dict__)
        self._loader = loader
        if not self._is_partitioned:
            self._set_weight = _ignore  # only the user knows which samples a worker has
            self._source: Any = BatchSource(loader, has_length=False)
            return
        if loader.generator is not None:
            seed = loader.generator.initial_seed() % 2**62  # as `MapStyleSource.reseed`
        self._source = source = wrap_loader(
            loader,
            partitions=True,
            training=True,
            world_size=world_size,
            rank=rank,
            seed=seed,
            layout=StepLayout(full_world_size),
        )
        source.change_partition(shares=shares if world_size == len(shares or ()) else None)
        self.sampler = self._sampler = _WorkerSampler(source, self._epochs, seed)
        if not self._epochs.is_alone:
            self._epochs.num_collectives = num_collectives
        if loader.batch_size is not None:
            self.batch_sampler = BatchSampler(self.sampler, loader.batch_size, loader.drop_last)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # bypass the guards of DataLoader

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Any:
        epoch, offset = self._epochs.begin()
        self._pass_position = None
        if self._is_partitioned:
            batches: Iterator[Any] = self._source.batches(epoch, offset)
        else:  # `BatchSource` would keep the iterator of a loop that the user leaves
            batches = itertools.islice(iterate_once(self._loader), offset, None)
        if (device := self._device) is not None and self._prefetches:
            batches = _prefetch(batches, device)
        elif device is not None:
            batches = (move_to_device(batch, device) for batch in batches)
        return self._track_position(self._epochs.track(batches, epoch, offset), epoch, offset)

    def _track_position(self, batches: Iterator[Any], epoch: int, offset: int) -> Iterator[Any]:
        """Yield the batches of a pass. Set its position, and the weight of each batch."""
        num_before, source = self._epochs.num_collectives(), self._source
        try:
            for batch in batches:
                plan, start, offset = source.plan(offset, 1), offset, source.offset_after(offset, 1)
                num, total = plan.num_samples, plan.total_samples
                if num and self.batch_size is None and self.batch_sampler is not None:
                    # The items of the plan are batches of the user, of any size.
                    first, end = next(source.partition.spans(start, 1))
                    num = len(source.sample_ids(epoch, first, end - first))
                    total = len(source.sample_ids(epoch, start, plan.total_samples))
                self._set_weight(num * self._world_size / (total or 1))
                self._pass_position = epoch, offset, num_before
                yield batch
        finally:
            self._set_weight(1.0)
        self._pass_position = None

    # ---- the position

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batches that the loop has received, for `load_state_dict`.

        The state is the same on all workers, and fits any number of workers.

        Raises:
            ValueError: if the order of a loader that is not split is random.
        """
        self._check_order()
        epoch, offset = self._epochs.begin()
        if self._pass_position and self._epochs.has_trained_since(self._pass_position[2]):
            epoch, offset, _ = self._pass_position
        if not self._is_partitioned:
            return {"epoch": epoch, "offset": offset, "num_workers": self._world_size}
        data = dict(self._source.resume_info(epoch, offset))
        return {"epoch": epoch, "offset": offset, "seed": self._sampler.seed, "data": data}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass begin at the result of `state_dict`.

        Raises:
            CheckpointError: if the data has changed since.
            ValueError: if the state is of another kind of loader, or if raysgd does not split this
                loader, and the state is of another number of workers within an epoch.
        """
        self._check_order()
        epoch, offset = state.get("epoch", 0), state.get("offset")
        if offset is None or self._is_partitioned != ("seed" in state):
            raise ValueError(
                f"load_state_dict(...): the state has {list(state)}, so its loader is of another "
                "kind. Pass the state of a loader with the same add_dist_sampler as this one."
            )
        if self._is_partitioned:
            self._source.check_resume_info(state["data"])
            self._sampler.seed = state["seed"]
            self._source.reseed(state["seed"], state["seed"])
            self._source.load_resume_info(state["data"])
        elif offset and state["num_workers"] != self._world_size:
            raise ValueError(
                f"load_state_dict(...): the state is of {state['num_workers']} workers within an "
                f"epoch, and there are {self._world_size}. {_ADVICE}"
            )
        self._epochs.epoch, self._epochs.loaded = epoch, {epoch: offset}
        self._pass_position = None

    def _check_order(self) -> None:
        known = isinstance(self._loader.dataset, IterableDataset) or size_and_rank_of(self._loader)
        sampler = self._loader.batch_sampler if makes_own_batches(self._loader) else self.sampler
        if not self._is_partitioned and not known and type(sampler) is not SequentialSampler:
            raise ValueError(
                f"This loader has no position, because the order of its {type(sampler).__name__} "
                f"is random, and raysgd does not split it. {_ADVICE}"
            )


def _prefetch(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Move each batch on a separate CUDA stream while the previous one is in use."""
    stream, ready = torch.cuda.Stream(device), list[Any]()
    for batch in batches:
        torch.cuda.current_stream(device).wait_stream(stream)  # for the previous batch
        # The copy may reuse the memory of a batch that queued steps still read.
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            moved = move_to_device(batch, device)
        yield from ready
        ready = [moved]
    torch.cuda.current_stream(device).wait_stream(stream)
    yield from ready


class _EpochCounter:
    """Counts the passes over a loader. After a pass that counts, the next epoch begins.

    One worker alone may look at batches, and all workers need the same epoch. Therefore, a pass
    counts if the workers communicate during it. If they communicated before, they may also do it
    between its last item and the next pass. Without a count of collectives, a pass counts from its
    second item, or at its end.
    """

    num_collectives: Callable[[], int | None] = staticmethod(lambda: None)
    loaded: Mapping[int, int] = {}
    """Epoch and offset of a loaded state, until a pass counts."""
    is_alone = False  # there is one worker, and all of its passes count
    sampler: Any = None  # of the user
    _epoch = 0
    _last_complete: tuple[int, int] | None = None
    """Arguments of `_count` for the last complete pass, which may still count."""

    @property
    def epoch(self) -> int:
        """The epoch of the next pass. The epoch of the user's sampler takes precedence."""
        own = getattr(self.sampler, "epoch", None) if hasattr(self.sampler, "set_epoch") else None
        return own if isinstance(own, int) else self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch, self._last_complete = epoch, None
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def begin(self) -> tuple[int, int]:
        """Return the epoch and the offset of a new pass."""
        if self._last_complete is not None:
            self._count(*self._last_complete)
        return self.epoch, self.loaded.get(self.epoch, 0)

    def track(self, items: Iterator[Any], epoch: int, start: int | None = None) -> Iterator[Any]:
        """Yield the items of a pass. `start` is its offset if it uses the loaded state."""
        num_before, is_over = self.num_collectives(), False
        try:
            for item in items:
                yield item
                if self._count(epoch, num_before) and start is not None:
                    self.loaded = {}
            is_over = True
            if start:  # it counts: all workers have loaded the rest, which can be empty
                num_before, self.loaded = None, {}
        finally:
            if is_over or num_before or self.is_alone:
                self._count(epoch, num_before)
            if is_over and num_before and self.epoch == epoch:
                self._last_complete = epoch, num_before

    def _count(self, epoch: int, num_before: int | None) -> bool:
        """Begin the next epoch if a pass of `epoch` counts. Return whether it does."""
        counts = self.has_trained_since(num_before)
        if counts and self.epoch == epoch:
            self.epoch += 1
        return counts

    def has_trained_since(self, num_before: int | None) -> bool:
        """Return whether the workers have trained since there were `num_before` collectives."""
        return num_before is None or num_before != self.num_collectives()


class _WorkerSampler(DistributedSampler[Any]):
    """Offers the epoch of a `MapStyleSource`, and this worker's indices, like PyTorch does."""

    def __init__(self, source: Any, epochs: _EpochCounter, seed: int) -> None:
        order, partition = source.order_sampler, source.partition
        size, rank = partition.world_size, partition.rank
        counted: Any = order or ()  # iterable data has no sampler
        self._epochs, epochs.is_alone = epochs, size == 1
        super().__init__(counted, size, rank, shuffle=is_plain_shuffle(order), seed=seed)
        epochs.sampler = order  # late, because the line above sets the epoch to 0
        self.source = source
        self.dataset = source.loader.dataset

    epoch: Any = property(
        lambda self: self._epochs.epoch, lambda self, epoch: setattr(self._epochs, "epoch", epoch)
    )

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.source.partition.spans())

    def __iter__(self) -> Iterator[Any]:
        epoch, _ = self._epochs.begin()
        return self._epochs.track(self.source.indices(epoch), epoch)


def _can_partition(loader: DataLoader[Any], partitions: _Partitions, full_world_size: int) -> bool:
    if not partitions or size_and_rank_of(loader) is not None:
        return False
    if makes_own_batches(loader):
        return partitions == "always" or isinstance(loader.dataset, Stream)
    if (reason := why_not_partitioned(loader)) and full_world_size > 1:
        logger.warning(
            "Every worker reads all data of a loader, because %s. Select the data by "
            "train.world_rank(), and pass add_dist_sampler=False to prepare_data_loader().",
            reason,
        )
    return not reason
