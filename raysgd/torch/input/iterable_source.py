"""Partition iterable data, which can only be read in order. Messages call it a stream.

Every worker reads all of it, and trains on its part of each step. The workers compare a digest of
the samples, so data that gives them different samples is an error.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_collate

from raysgd.data.partition import UpdatePlan
from raysgd.data.source import PartitionedSource, SourceBatch, length_of, set_loader_epoch
from raysgd.data.stream import NumberedSamples, UnsizedStream, close_files, file_stamps
from raysgd.torch.input.batches import map_batch
from raysgd.torch.input.iterable_reading import (
    ChunkDataset,
    SampleBuffer,
    can_seek,
    name_of,
    start_of_epoch,
    with_chunks,
)


class IterableSource(PartitionedSource):
    """Iterable data, read by every worker.

    The samples of a DataLoader over an IterableDataset are partitioned. For any other loader, each
    item is a ready batch, and the workers take turns.

    `requested_global_batch_size` determines the order of the samples of several loader processes,
    because it does not depend on the number of workers.
    """

    data_kind = "a stream"
    reading_advice = "use a data set that can be indexed, or raysgd.data.Stream for files"
    order_sampler = None
    epoch_samples = 0
    compares_samples = True
    step_digest: Any = property(
        lambda self: (self._buffer.digest_at(sum(self._newest_step)) << 24) + self._newest_step[1]
    )
    _current_size: Any = property(lambda self: known_length(self.loader))

    def __init__(self, loader: Any, *, seed: int, **partition_arguments: Any) -> None:
        self._collates, self._seed = collates_iterable(loader), seed
        self._dataset: Any = loader.dataset if self._collates else loader
        size, drop_last = (loader.batch_size, loader.drop_last) if self._collates else (None, False)
        super().__init__(loader, known_length(loader), size, bool(drop_last), **partition_arguments)
        self.knows_sizes = self._collates and keeps_all_samples(loader)
        self.shuffles = isinstance(self._dataset, NumberedSamples) and self._dataset.shuffles
        resumes = can_seek(self._dataset)
        self.who_reads = (
            "every worker reads all samples, and uses its part. A resumed run begins to read "
            f"{'where a checkpoint ends' if resumes else 'at the start of the epoch'}"
        )
        if isinstance(getattr(loader, "dataset", loader), UnsizedStream):
            self.reading_advice = "use the Stream without group_size and skip_broken"
        self._forget()
        self.end_processes()

    def __iter__(self) -> Iterator[Any]:
        copied = self._copy_for_user()
        copied._forget()
        for batch in copied.batches(self.current_epoch or 0, 0):
            yield batch
            copied._buffer.trim(copied._newest_step[0])

    # ---- batches

    def read(self, epoch: int, offset: int, num_steps: int | None = None) -> Iterator[SourceBatch]:
        self._seek(epoch, offset)
        partition, first, self.steps_read = self._partition, offset, 0
        end = sys.maxsize if num_steps is None else offset + num_steps * partition.global_batch_size
        turns = partition.world_size * partition.batch_size  # of all workers, in validation
        unit = partition.global_batch_size if partition.training else turns
        while offset < end:
            size = self._read_to(offset, min(unit, end - offset))
            self._newest_step = offset, size
            step = replace(partition, epoch_size=size)
            if step.end_index(0) == 0:
                return
            self.steps_read = -(-(offset + size - first) // partition.global_batch_size)
            for start, stop in step.spans():
                num_collated_samples = stop - start if self._collates else None
                yield SourceBatch(self._batch(offset + start, offset + stop), num_collated_samples)
            offset += size
            if not partition.training:
                self._buffer.trim(offset)
        if offset == self.partition.epoch_size:
            self._read_to(offset, 1)  # code of the loader after its last batch may matter

    def _batch(self, start: int, stop: int) -> Any:
        samples = self._buffer.samples(start, stop)
        if not self._collates:
            return samples[0]
        batch = self.loader.collate_fn(samples)
        if self.loader.pin_memory and torch.cuda.is_available():
            return map_batch(
                batch, lambda leaf: leaf.pin_memory() if torch.is_tensor(leaf) else leaf
            )
        return batch

    def plan(self, offset: int, num_steps: int) -> UpdatePlan:
        self._buffer.trim(offset)
        partition = self._partition
        starts = range(
            offset, offset + num_steps * partition.global_batch_size, partition.global_batch_size
        )
        sizes = [self._read_to(start, partition.global_batch_size) for start in starts]
        least = partition.global_batch_size if partition.drop_last else 1
        return partition.plan(tuple(size for size in sizes if size >= least))

    def offset_after(self, offset: int, num_steps: int) -> int:
        end = offset + num_steps * self._partition.global_batch_size
        return min(end, self._buffer.end) if self._buffer.has_ended else end

    # ---- what continues an epoch

    def resume_info(self, epoch: int, offset: int) -> Mapping[str, Any]:
        if offset == 0:
            return {}
        if self._saved.get("at") == [epoch, offset]:
            return self._saved
        if self._reading != (epoch, self._seed) or not self._buffer.knows(offset):
            return {}
        info = {"at": [epoch, offset], "digest": self._buffer.digest_at(offset)}
        mark = self._buffer.mark_before(offset)
        if mark["offset"]:  # not the start of the epoch
            info["mark"] = mark
        return info | file_stamps(self._dataset)

    def fingerprint(self) -> str:
        return f"a stream, {name_of(self._dataset)}"

    def describe(self) -> str:
        what = f"{self.batch_size} samples" if self._collates else "one batch"
        return f"a stream, {name_of(self._dataset)}, with {what} per worker and step"

    # ---- reading

    def end_processes(self) -> None:
        super().end_processes()
        close_files(self._dataset)
        self._buffer.close()  # its digests stay, to compare the samples of the next iteration

    def _forget(self) -> None:
        """Begin without samples and without digests."""
        self._reading: tuple[int, int] | None = None  # epoch and seed
        self._buffer = SampleBuffer((), start_of_epoch(0))

    def _seek(self, epoch: int, offset: int) -> None:
        if self._reading != (epoch, self._seed) or not self._buffer.holds(offset):
            self._open(epoch, offset)
        # Skip samples without keeping all of them.
        while self._buffer.end < offset and self._read_to(self._buffer.end, 1):
            self._buffer.trim(min(offset, self._buffer.end))
        known = self._saved.get("digest") if self._saved.get("at") == [epoch, offset] else None
        if not self._buffer.holds(offset) or known not in (None, self._buffer.digest_at(offset)):
            raise RuntimeError(
                f"Training cannot continue in epoch {epoch} after {offset} samples, because the "
                f"stream, {name_of(self._dataset)}, now gives other samples. It must give "
                "the same samples in each iteration of an epoch: seed its shuffles, do not change "
                "its files, and use config[BATCH_SIZE] with loader processes. Otherwise, continue "
                "from a checkpoint of the end of an epoch."
            )
        self._buffer.trim(offset)
        self._newest_step = offset, 0  # start and size of the newest step

    def _open(self, epoch: int, offset: int) -> None:
        self._saved = self.resume_info(epoch, offset)
        self.end_processes()
        set_loader_epoch(self.loader, epoch)
        num_processes = self.loader.num_workers if self._collates else 0
        start = start_of_epoch(max(1, num_processes))
        mark = self._saved.get("mark", start)
        if not can_seek(self._dataset) or len(mark["states"]) != len(start["states"]):
            mark = start
        seed, requested = self._seed + epoch, self._requested_batch_size
        size = requested if self._follows_config and requested else self.batch_size
        chunks: Any = ChunkDataset(self._dataset, size, seed, mark)
        if num_processes:
            chunks = self._iteration = iter(with_chunks(self.loader, chunks, seed))
        self._buffer, self._reading = SampleBuffer(chunks, mark), (epoch, self._seed)

    def _read_to(self, start: int, size: int) -> int:
        try:
            return self._buffer.read_to(start, size)
        except BaseException:
            self.end_processes()  # a generator that has raised looks like one that has ended
            raise


def keeps_all_samples(loader: DataLoader[Any]) -> bool:
    """Return whether each batch surely has all its samples. A collate_fn of users may drop some."""
    return loader.batch_size is not None and loader.collate_fn is default_collate


def collates_iterable(loader: Any) -> bool:
    """Return whether a DataLoader collates batches from the samples of an IterableDataset."""
    return (
        isinstance(loader, DataLoader)
        and isinstance(loader.dataset, IterableDataset)
        and type(loader).__iter__ is DataLoader.__iter__
        and loader.batch_size is not None
        and type(loader.batch_sampler) is BatchSampler
    )


def known_length(loader: Any) -> int | None:
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        return None  # PyTorch can only guess it
    return length_of(loader)
