"""Copies of a user's loader with other settings, another sampler, or another data set."""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from raysgd.torch.input.orders import seed_all


def clone(loader: DataLoader[Any], **settings: Any) -> DataLoader[Any]:
    """Return a copy of a loader of the same type with other settings and no worker processes."""
    cloned = copy.copy(loader)
    for name, value in settings.items():
        object.__setattr__(cloned, name, value)  # bypass the guards of DataLoader
    cloned._iterator = None
    cloned.in_order = True  # a position needs the order
    return cloned


def with_dataset(loader: DataLoader[Any], wrapper: Any) -> DataLoader[Any]:
    """Return a copy of a loader that reads `wrapper`, whose attribute ``dataset`` is the user's."""
    init = functools.partial(_init_worker, loader.worker_init_fn)
    return clone(loader, dataset=wrapper, worker_init_fn=init)


def _init_worker(user_function: Callable[[int], None] | None, process: int) -> None:
    info: Any = get_worker_info()
    # User code expects its own data set.
    object.__setattr__(info, "dataset", info.dataset.dataset)
    if user_function is not None:
        user_function(process)


def without_states(loader: Any) -> Any:
    """Return a DataLoader in place of torchdata's, whose samplers count the epochs of a process."""
    if type(loader).__module__ != "torchdata.stateful_dataloader.stateful_dataloader":
        return loader
    batches = loader.batch_sampler
    has_own = type(batches).__module__.startswith("torchdata.")
    sampler = batches.sampler if has_own else loader.sampler
    is_divided = isinstance(sampler, DistributedSampler)  # user code may call its set_epoch
    if type(sampler).__module__.startswith("torchdata.") and not is_divided:
        sampler = RandomSampler(sampler.data_source, sampler.replacement, sampler._num_samples)
    if has_own:
        batches = BatchSampler(sampler, batches.batch_size, batches.drop_last)
    return clone(loader, __class__=DataLoader, sampler=sampler, batch_sampler=batches)


def unpartition(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader of all samples, with a DistributedSampler of one replica at most."""
    batches = loader.batch_sampler
    if type(batches) is BatchSampler and loader.batch_size is None:
        size, drop_last = batches.batch_size, batches.drop_last
        loader = clone(loader, sampler=batches.sampler, batch_size=size, drop_last=drop_last)
    if is_distributed(loader):
        sampler: Any = loader.sampler
        undivided = copy.copy(sampler)
        DistributedSampler.__init__(undivided, sampler.dataset, 1, 0, sampler.shuffle, sampler.seed)
        loader = clone(loader, sampler=undivided)
    return loader


def is_distributed(loader: Any) -> bool:
    sampler = getattr(loader, "sampler", None)
    return (
        isinstance(loader, DataLoader)
        and isinstance(sampler, DistributedSampler)
        and type(sampler).__init__ is DistributedSampler.__init__
    )


class EpochSampler:
    """A sampler whose keys are set before each epoch, for a loader that lasts several epochs."""

    keys: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys)


class SeededSamples(Dataset[Any]):
    """A data set whose random numbers follow from the seed, the epoch, and the position in it.

    Its indices are pairs of these seeds and the index, because loader processes have copies of this
    object.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, key: tuple[tuple[int, ...], Any]) -> Any:
        seeds, index = key
        seed_all(*seeds)
        return self.dataset[index]
