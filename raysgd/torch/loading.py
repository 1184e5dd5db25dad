"""Loaders as workers use them: sharded where that is possible, left as they are where not."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import numbers
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from raysgd.data import Dataset as ItemDataset
from raysgd.data.shard import Shard
from raysgd.data.source import Source, UnsharedSource
from raysgd.torch.rows import rows_of
from raysgd.torch.seeding import seeded

__all__ = ["ShardedLoader", "UnsharedLoader", "bytes_of", "dataset_loader", "wrap_loader"]

Order = torch.Tensor | list[Any] | None
"""What a sampler gives in an epoch: indices, or keys of other kinds; None: as the data set has it.
"""


class UnsharedLoader(UnsharedSource):
    """A loader that is left as it is: an iterable, or one with a batch sampler of its own."""

    def steps_left(self, offset: int) -> int | None:
        """Return the number of batches after `offset`, where the loader has a length."""
        if isinstance(self.loader, DataLoader) and isinstance(self.loader.dataset, IterableDataset):
            return None  # its length is a guess, torch says
        return super().steps_left(offset)


class ShardedLoader(Source):
    """A map-style DataLoader, shared out over the workers by :class:`Shard`.

    The order of an epoch follows from the loader's own sampler, the seed and the epoch, so that
    every worker knows it without asking.
    """

    sharded = True

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        training: bool,
        world_size: int,
        rank: int,
        seed: int,
        batch_share: int | None = None,
    ) -> None:
        super().__init__(loader)
        self.reseed(seed)
        self._training = training
        # a loader that does not collate gives one item, a ready batch, at a time
        self._batch_size = 1 if loader.batch_size is None else loader.batch_size
        # a loader made with config[BATCH_SIZE] follows it when the workers become more or fewer
        self._follows_share = batch_share is not None and loader.batch_size == batch_share
        self._iterates_itself = _iterates_itself(loader)
        self._rows = None if self._iterates_itself else rows_of(loader)
        self._size_and_rank = (world_size, rank)
        self._worker_loader: DataLoader[Any] | None = None
        self._order: tuple[tuple[int, int], Order] | None = None

    @property
    def batch_size(self) -> int:
        """Samples that this worker takes at a step."""
        return self._batch_size

    @property
    def shard(self) -> Shard:
        """This worker's part."""
        world_size, rank = self._size_and_rank
        return Shard(
            total=len(self.loader.sampler),
            batch_size=self._batch_size,
            world_size=world_size,
            rank=rank,
            drop_last=bool(self.loader.drop_last),
            even=self._training,
        )

    def __len__(self) -> int:
        """Batches of this worker in an epoch."""
        return sum(1 for _ in self.shard.batches())

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this worker's batches of the first epoch."""
        # by a copy, since an iteration under way would lose its worker processes to this one
        apart = copy.copy(self)
        apart._worker_loader = None
        return apart.batches(epoch=0, offset=0)

    def reshard(self, world_size: int, rank: int, batch_share: int | None) -> None:
        """Share the epoch out anew among `world_size` workers."""
        self._size_and_rank = (world_size, rank)
        if self._follows_share and batch_share is not None:
            self._batch_size = batch_share

    def batching(self) -> tuple[int, bool]:
        """Return a worker's samples at a step, and whether they follow ``config[BATCH_SIZE]``."""
        return self._batch_size, self._follows_share

    def set_batch_size(self, size: int, follows_share: bool) -> None:
        """Make batches as another worker does, whose `batching` this is."""
        self._batch_size, self._follows_share = size, follows_share

    def reseed(self, seed: int) -> None:
        """Let the order follow from `seed`, or from a generator that the user gave the loader."""
        generator = self.loader.generator
        self._seed = seed if generator is None else generator.initial_seed() % 2**62

    @property
    def own_seed(self) -> int | None:
        """The seed in use where the user gave the loader a generator; None where none was given."""
        return None if self.loader.generator is None else self._seed

    def take_own_seed(self, seed: int) -> None:
        """Go by another worker's, or a saved, `own_seed`, until `reseed` is called."""
        if self.loader.generator is not None:
            self._seed = seed

    def steps_left(self, offset: int) -> int:
        """Return how many steps follow `offset`."""
        return self.shard.num_steps(offset)

    def offset_after(self, offset: int, num_steps: int) -> int:
        """Return the offset `num_steps` steps after `offset`."""
        return self.shard.offset_after(offset, num_steps)

    def num_taken(self, offset: int, num_steps: int) -> int:
        """Return how many samples this worker takes at so many steps."""
        return self.shard.num_taken(offset, num_steps)

    def num_samples(self, start: int, stop: int) -> int:
        """Return how many samples lie between two places, but for those that are dropped."""
        # the place at the end of an epoch lies behind them
        return min(stop, self.shard.end(start)) - start

    def batches(self, epoch: int, offset: int, num_steps: int | None = None) -> Iterator[Any]:
        """Iterate over this worker's batches of `epoch` from `offset` on."""
        order = self._order_of(epoch)
        if self._rows is not None and not isinstance(order, list):
            return self._rows.batches(order, self.shard.batches(offset, num_steps))
        indices = _Batches(order, self.shard, offset, num_steps)
        loader = self._loader_for(indices, begins=offset == 0)
        # each worker's loader draws from seeds of its own, and nothing from the generators that a
        # resumed run takes over
        world_size, rank = self._size_and_rank
        seed = self._seed + (epoch + 1) * world_size + rank
        if self._iterates_itself and self.loader.generator is None:
            # where its __iter__ is a generator, it draws when the first batch is asked for
            loader.generator = torch.Generator().manual_seed(seed)
        with seeded(seed, None):
            batches = iter(loader)
        return self._checked(batches, indices) if self._iterates_itself else batches

    def _checked(self, batches: Iterator[Any], indices: _Batches) -> Iterator[Any]:
        """Yield what a loader that iterates in its own way gives for `indices`."""
        kind = type(self.loader).__name__
        num_batches, num_given = len(indices), 0
        # a loader that goes round and round ends here
        for batch in itertools.islice(batches, num_batches):
            if not indices.drawn:
                raise RuntimeError(
                    f"{kind} gave a batch without drawing from its sampler, so that it cannot be "
                    "shared out: every worker would read the same. Let its __iter__ draw from "
                    "self.batch_sampler (self.sampler where batch_size is None), as "
                    "super().__iter__() does, or pass add_dist_sampler=False to the trainer and "
                    "let each worker read a part of its own, by self.world_rank."
                )
            num_given += 1
            yield batch
        if num_given < num_batches and self._training and self._size_and_rank[0] > 1:
            raise RuntimeError(
                f"{kind} gave {num_given} batches where its sampler has {num_batches}, so that "
                "the other workers would wait for this one. Let its __iter__ give one batch for "
                "each that it draws, or pass add_dist_sampler=False to the trainer and let each "
                "worker read a part of its own, by self.world_rank."
            )

    def _order_of(self, epoch: int) -> Order:
        """Return the order of an epoch."""
        sampler = self.loader.sampler
        if type(sampler) is SequentialSampler:
            return None
        key = (self._seed, epoch)
        if self._order is None or self._order[0] != key:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            generator = getattr(sampler, "generator", None)
            if not isinstance(generator, torch.Generator):
                generator = None  # numpy's, say, which cannot be put back
            with seeded(self._seed + epoch, generator):
                if _is_plain_shuffle(sampler):
                    order: Order = torch.randperm(len(sampler.data_source))
                else:
                    order = _compact(list(sampler))
            self._order = (key, order)
        return self._order[1]

    def has_order(self, epoch: int) -> bool:
        """Whether the order of an epoch has been drawn, and is kept."""
        return self._order is not None and self._order[0] == (self._seed, epoch)

    def order(self, epoch: int) -> Order:
        """Return the order of an epoch."""
        return self._order_of(epoch)

    def take_order(self, epoch: int, order: Order) -> None:
        """Go by another worker's order of an epoch."""
        self._order = ((self._seed, epoch), order)

    def order_digest(self, epoch: int) -> int | None:
        """Return what tells orders apart, where a sampler or a generator is the user's."""
        sampler = self.loader.sampler
        if type(sampler) is SequentialSampler:
            return None
        if _is_plain_shuffle(sampler):
            return self.own_seed  # all that its order depends on, beside the epoch
        data = bytes_of(self._order_of(epoch))
        return int.from_bytes(hashlib.sha256(data).digest()[:8], "little") % 2**62

    def close_workers(self) -> None:
        """Let go of the loader's worker processes; the next iteration starts others."""
        self._worker_loader = None

    def fingerprint(self) -> str:
        """Return what has to be the same on all workers: the size, and which samples these are."""
        shard = self.shard
        sizes = f"{shard.total} samples, drop_last {shard.drop_last}"
        if self.loader.batch_size is None:
            sizes += ", batch_size None"
        if self.loader.generator is not None:
            sizes += ", a generator of its own"
        return f"{sizes}, {_content_of(self.loader.dataset)}".rstrip(", ")

    def describe(self) -> str:
        """Say how many samples are shared out among how many workers."""
        shard = self.shard
        return (
            f"{shard.total} samples, batch size {shard.batch_size} on each of {shard.world_size} "
            f"workers, drop_last={shard.drop_last}"
        )

    def _loader_for(self, indices: _Batches, begins: bool) -> DataLoader[Any]:
        """Return a DataLoader with the user's settings that fetches `indices`.

        Its worker processes are kept within an epoch, also where a new iteration begins in the
        middle of one, and from epoch to epoch only where the user asked for that. A loader that
        iterates in its own way does with its processes what it does without us; it stays the same
        object, which may count its epochs.
        """
        kept = self._worker_loader
        stays = self._iterates_itself or self.loader.persistent_workers or not begins
        if kept is not None and stays:
            _indices_of(kept).source = indices
            return kept
        sampler = _Indices(indices, flat=self.loader.batch_size is None)
        make = self._own_kind if self._iterates_itself else self._plain_kind
        made = self._worker_loader = make(sampler)
        return made

    def _own_kind(self, sampler: _Indices) -> DataLoader[Any]:
        """Return a copy of the user's loader, so of its own type, that draws from `sampler`."""
        made: DataLoader[Any] = copy.copy(self.loader)
        collating = self.loader.batch_size is not None
        # DataLoader.__setattr__ refuses these
        object.__setattr__(made, "batch_sampler" if collating else "sampler", sampler)
        made._iterator = None
        return made

    def _plain_kind(self, sampler: _Indices) -> DataLoader[Any]:
        loader, in_workers = self.loader, self.loader.num_workers > 0
        settings: dict[str, Any] = {
            "num_workers": loader.num_workers,
            "collate_fn": loader.collate_fn,
            "pin_memory": loader.pin_memory,
            "timeout": loader.timeout,
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
            "generator": loader.generator,
            "persistent_workers": in_workers,
            "in_order": loader.in_order,
        }
        if in_workers:
            settings["prefetch_factor"] = loader.prefetch_factor
        if loader.batch_size is not None:
            settings["batch_sampler"] = sampler
        else:
            settings.update(batch_size=None, sampler=sampler)
        return DataLoader(loader.dataset, **settings)


class _Batches:
    """The indices of batches, made as they are asked for."""

    def __init__(self, order: Order, shard: Shard, offset: int, num_steps: int | None) -> None:
        self._order, self._shard, self._part = order, shard, (offset, num_steps)
        self.drawn = False
        """Whether any has been asked for."""

    def __len__(self) -> int:
        return sum(1 for _ in self._shard.batches(*self._part))

    def __iter__(self) -> Iterator[list[Any]]:
        self.drawn = True
        order = self._order
        for start, stop in self._shard.batches(*self._part):
            if order is None:
                yield list(range(start, stop))
            else:
                part = order[start:stop]
                yield part if isinstance(part, list) else part.tolist()


class _Indices:
    """A sampler whose indices can be replaced between two iterations."""

    def __init__(self, source: _Batches, flat: bool) -> None:
        self.source = source
        self._flat = flat

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Any]:
        if self._flat:
            return (index for batch in self.source for index in batch)
        return iter(self.source)


def _indices_of(loader: DataLoader[Any]) -> _Indices:
    batched: Any = loader.batch_sampler
    single: Any = loader.sampler
    return batched if isinstance(batched, _Indices) else single


def wrap_loader(
    loader: Any,
    *,
    training: bool,
    shard: bool,
    world_size: int,
    rank: int,
    seed: int,
    batch_share: int | None = None,
) -> Source:
    """Return the source of batches for a loader that was registered.

    Map-style DataLoaders are sharded if `shard`. A loader with a batch sampler of its own, or
    with a DistributedSampler, decides for itself what a worker gets; an iterable cannot be
    shared out.
    """
    if isinstance(loader, DataLoader):
        _check_data_set(loader)
    if shard and isinstance(loader, DataLoader) and _can_shard(loader):
        return ShardedLoader(
            loader,
            training=training,
            world_size=world_size,
            rank=rank,
            seed=seed,
            batch_share=batch_share,
        )
    return UnsharedLoader(loader)


def _content_of(dataset: Any) -> str:
    """Return a short text that is the same for the same samples, where that is cheap to tell."""
    if isinstance(dataset, Subset):
        try:
            indices = torch.as_tensor(dataset.indices, dtype=torch.int64)
        except (OverflowError, RuntimeError, TypeError, ValueError):  # keys of another kind
            return f"subset of {_content_of(dataset.dataset)}"
        return f"subset {_digest(indices)} of {_content_of(dataset.dataset)}"
    if type(dataset) is TensorDataset:
        ends = [tensor[[0, -1]] for tensor in dataset.tensors if len(tensor)]
        return "tensors " + " ".join(_digest(rows) for rows in ends)
    return ""


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:8]


def _can_shard(loader: DataLoader[Any]) -> bool:
    return (
        not isinstance(loader.dataset, IterableDataset)
        and (loader.batch_sampler is None or _made_by_torch(loader))
        and not isinstance(loader.sampler, DistributedSampler)
        and hasattr(loader.sampler, "__len__")
    )


def _iterates_itself(loader: DataLoader[Any]) -> bool:
    """Whether a loader is of a type that makes its batches in a way of its own."""
    kind = type(loader)
    return (
        kind.__iter__ is not DataLoader.__iter__
        or kind._get_iterator is not DataLoader._get_iterator
    )


def _made_by_torch(loader: DataLoader[Any]) -> bool:
    """Whether a loader's batch sampler was made from its batch size, and not given by the user."""
    # where one is given, torch sets batch_size to None, and sampler to one that is not used
    return type(loader.batch_sampler) is BatchSampler and loader.batch_size is not None


def _check_data_set(loader: DataLoader[Any]) -> None:
    """Check that a loader is not over a generator, which torch finds out when it is read."""
    data: Any = loader.dataset
    if isinstance(data, Iterator) and not hasattr(data, "__getitem__"):
        raise TypeError(
            f"A DataLoader that was registered reads a {type(data).__name__}, which can neither be "
            "indexed nor read a second time. Give the DataLoader a list or a Dataset, or an "
            "IterableDataset whose __iter__ is the generator."
        )


def _compact(keys: list[Any]) -> torch.Tensor | list[Any]:
    """Return the keys of an order as a tensor, where they are integers."""
    kinds = set(map(type, keys))
    if torch.Tensor in kinds:
        kinds.remove(torch.Tensor)
        if not all(map(_is_index, keys)):
            return keys
    if all(issubclass(kind, numbers.Integral) for kind in kinds):
        # keys that 64 bits do not hold, which versions of torch refuse in different ways
        with contextlib.suppress(OverflowError, RuntimeError, ValueError):
            return torch.tensor(keys, dtype=torch.int64)
    return keys


def bytes_of(order: Order) -> bytes:
    """Return bytes for an order that are the same in every process."""
    if isinstance(order, list):
        order = _compact(order)
    return order.numpy().tobytes() if isinstance(order, torch.Tensor) else _text_of(order).encode()


def _text_of(key: Any) -> str:
    """Return a text for a key that is the same in every process."""
    if isinstance(key, torch.Tensor | np.ndarray | np.generic):
        key = key.tolist()
    if isinstance(key, tuple | list):
        return f"({', '.join(map(_text_of, key))})"
    # others may be shown with where they lie in memory
    shown = key is None or isinstance(key, str | bytes | slice | numbers.Number)
    return repr(key) if shown else type(key).__qualname__


def _is_index(key: Any) -> bool:
    return not isinstance(key, torch.Tensor) or (key.dim() == 0 and not key.is_floating_point())


def _is_plain_shuffle(sampler: Any) -> bool:
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )


def dataset_loader(dataset: ItemDataset) -> DataLoader[Any]:
    """Return a DataLoader over a :class:`raysgd.data.Dataset`."""
    return DataLoader(dataset, batch_size=dataset.batch_size, collate_fn=_joined)  # type: ignore[arg-type]


def _joined(samples: list[Any]) -> Any:
    """Make a batch of samples that may be small batches themselves."""
    if not isinstance(samples[0], tuple | list):
        return _column(samples)
    return [_column(list(column)) for column in zip(*samples, strict=True)]


def _column(values: list[Any]) -> Any:
    if isinstance(values[0], torch.Tensor) and values[0].dim() > 0:
        return torch.cat(values)
    return default_collate(values)
