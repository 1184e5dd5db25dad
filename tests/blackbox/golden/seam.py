"""Sharding of an epoch without a trainer. This file depends on internals.

Each function returns the batches of each worker as lists of samples. If the internals of sharding
change, adapt this file and keep the recorded orders.
"""

import itertools

from raysgd.data.partition import StepLayout
from raysgd.torch.input.sources import wrap_loader
from raysgd.train.torch.prepared_loader import PreparedLoader

__all__ = ["keras_epoch", "operator_epoch", "prepared_passes"]


def operator_epoch(make_loader, *, training, seed, epoch, segments, global_batch=None):
    """Read an epoch of a loader that an operator registers.

    Args:
        make_loader: returns the loader. Its argument is a worker's share of `global_batch`.
        training: whether it is the training loader.
        seed: seed of the trainer.
        epoch: number of the epoch.
        segments: pairs (number of workers, number of steps), one after the other. None means all
            remaining steps. The full group has the largest number of workers.
        global_batch: ``config[BATCH_SIZE]``, or None if the loader has its own batch size.

    Returns:
        A list of segments, each a list of workers.
    """
    full_size = max(size for size, _ in segments)
    offset, share = 0, global_batch and global_batch // full_size
    first = segments[0][0]
    sources = {}
    read = []
    for world_size, num_steps in segments:
        workers = []
        for rank in range(world_size):
            if rank not in sources:
                sources[rank] = wrap_loader(
                    make_loader(share),
                    training=training,
                    partitions=True,
                    world_size=first,
                    rank=rank,
                    seed=seed,
                    worker_batch_size=share,
                    layout=StepLayout(full_size),
                    requested_global_batch_size=global_batch,
                )
            sources[rank].repartition(world_size, rank, share)
            batches = sources[rank].batches(epoch, offset, num_steps)
            workers.append([_samples(batch) for batch in batches])
        read.append(workers)
        if num_steps is not None:
            offset = sources[0].offset_after(offset, num_steps)
    return read


def prepared_passes(make_loader, *, world_size, seed):
    """Read a loader that a training function has prepared, twice."""
    workers = []
    for rank in range(world_size):
        loader = PreparedLoader(
            make_loader(), world_size=world_size, rank=rank, device=None, prefetch=False, seed=seed
        )
        workers.append([[_samples(batch) for batch in loader] for _ in range(2)])
    return workers


def keras_epoch(data, *, training, seed, epoch, segments, batch_size=None):
    """Read an epoch of a Keras operator, from arrays (with a batch size) or a ``tf.data.Dataset``.

    `segments` are like those of `operator_epoch`.
    """
    from raysgd.tf.sources import ArraySource, DatasetSource

    offset, read = 0, []
    full_size = max(size for size, _ in segments)
    for world_size, num_steps in segments:
        workers = []
        for rank in range(world_size):
            place = {"training": training, "world_size": world_size, "rank": rank}
            place["layout"] = StepLayout(full_size)
            if batch_size is None:
                source = DatasetSource(data, **place)
            else:
                source = ArraySource(
                    data, batch_size=batch_size, shuffle=training, seed=seed, **place
                )
            batches = source.batches(epoch, offset, num_steps)
            workers.append([batch.numpy().tolist() for batch in itertools.islice(batches, 1000)])
        read.append(workers)
        if num_steps is not None:
            offset = source.offset_after(offset, num_steps)
    return read


def _samples(batch):
    """Return the samples of a batch, which are their own indices."""
    return (batch[0] if isinstance(batch, list | tuple) else batch).reshape(-1).int().tolist()
