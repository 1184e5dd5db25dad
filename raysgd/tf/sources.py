"""Data sources of Keras operators. Arrays are partitioned by sample, pipelines by batch.

Every worker reads the whole ``tf.data`` pipeline, as with ``AutoShardPolicy.DATA``. In each step,
the workers together take its next batches: rank 0 the first, rank 1 the second. A step of two
workers thus has the same samples as two steps of one worker.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from raysgd._internal.collectives import Collectives
from raysgd._internal.nested import describe
from raysgd.data.partition import BY_WORKERS, EpochPartition, StepLayout, part_bounds
from raysgd.data.source import BatchSource, PartitionedSource, SourceBatch
from raysgd.loop.sources import DataSources
from raysgd.tf.options import KerasSettings

_DEFAULT_BATCH_SIZE = 32
_NUM_COMPARED = 512
"""Number of elements of each tensor that workers compare, evenly spaced."""
_NUM_EQUAL = 100
"""Number of equal targets that may be a rare class, and after which they are placeholders."""


class KerasSources(DataSources):
    """Reads data sets of TensorFlow, arrays, and iterables."""

    _settings: KerasSettings
    batch_size: int | None = None
    """Number of samples in a worker's batch of arrays."""
    shuffle = True

    def wrap(self, loader: Any, training: bool) -> BatchSource:
        if isinstance(loader, keras.utils.PyDataset):
            raise TypeError(
                f"TFTrainer does not partition a keras.utils.PyDataset, such as {loader!r}. Pass "
                "arrays, a tf.data.Dataset, or an iterable of the batches of self.world_rank."
            )
        settings, arguments = self._settings, self._settings.partition_arguments
        if is_arrays(loader):
            return ArraySource(
                loader,
                training=training,
                batch_size=self.batch_size or settings.worker_batch_size or _DEFAULT_BATCH_SIZE,
                shuffle=self.shuffle,
                seed=self.seed,
                worker_batch_size=settings.worker_batch_size,
                **arguments,
            )
        if isinstance(loader, tf.data.Dataset) and settings.options.add_dist_sampler:
            divides = settings.options.divides_batches
            return DatasetSource(loader, training=training, divides_batches=divides, **arguments)
        why = "it is neither arrays nor a tf.data.Dataset"
        return BatchSource(
            loader, user_selects=not settings.options.add_dist_sampler, why_not_partitioned=why
        )

    def check_end(self) -> None:
        loader = self.training_source.loader
        _check_end(loader, "training", "train(num_steps=...) or fit(max_steps=...)")


def _check_end(loader: Any, what: str, remedy: str) -> None:
    endless = tf.data.INFINITE_CARDINALITY
    if isinstance(loader, tf.data.Dataset) and int(loader.cardinality()) == endless:
        raise ValueError(
            f"The {what} data set repeats without end. Pass a number of steps with {remedy}, or "
            "register dataset.take(n), whose epochs have n batches."
        )


def is_arrays(data: Any) -> bool:
    """Return whether data is an array, or a tuple or dict of arrays."""
    leaves = tf.nest.flatten(data) if isinstance(data, tuple | dict) else [data]
    return bool(leaves) and all(hasattr(leaf, "__array__") for leaf in leaves)


def _as_array(data: Any) -> np.ndarray[Any, Any]:
    """Return an array. A Series of pandas becomes a column, as in ``fit()``."""
    array = np.asarray(data)
    return array[:, np.newaxis] if hasattr(data, "to_frame") else array


class ArraySource(PartitionedSource):
    """An array or a nest of arrays, partitioned across the workers by sample.

    In training, every worker gets a batch in every step.
    """

    def __init__(
        self,
        arrays: Any,
        *,
        training: bool,
        batch_size: int,
        shuffle: bool,
        seed: int,
        **partition_arguments: Any,
    ) -> None:
        self._arrays = tf.nest.map_structure(_as_array, arrays)
        if any(leaf.ndim == 0 for leaf in tf.nest.flatten(self._arrays)):
            raise ValueError(
                "An array of the data has no dimension. Register arrays of shape (samples, ...)."
            )
        lengths = {len(leaf) for leaf in tf.nest.flatten(self._arrays)}
        if len(lengths) != 1:
            raise ValueError(
                f"Arrays of a data set must have the same length, but they have {sorted(lengths)}."
            )
        super().__init__(
            arrays, lengths.pop(), batch_size, False, training=training, **partition_arguments
        )
        self._shuffle, self._seed = shuffle and training, seed

    def read(self, epoch: int, offset: int, num_steps: int | None = None) -> Iterator[SourceBatch]:
        order = np.arange(self._partition.epoch_size)
        if self._shuffle:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(order))
        for start, stop in self._partition.spans(offset, num_steps):
            rows = order[start:stop]
            batch = tf.nest.map_structure(
                lambda leaf, rows=rows: tf.convert_to_tensor(leaf[rows]), self._arrays
            )
            yield SourceBatch(batch)

    def batch_spec(self) -> Any:
        return tf.nest.map_structure(
            lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), self._arrays
        )

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for leaf in tf.nest.flatten(self._arrays):
            ends = leaf[[0, -1]] if len(leaf) else leaf
            # The bytes of Python objects are addresses.
            digest.update(repr(ends.tolist()).encode() if ends.dtype.hasobject else ends.tobytes())
        return f"{self._partition.epoch_size} samples, arrays {digest.hexdigest()[:8]}"


class DatasetSource(PartitionedSource):
    """A ``tf.data.Dataset``, whose batches are the items of the partition.

    In each training step, every worker gets a batch, or a part of it if `divides_batches`.
    """

    knows_sizes = False
    # The partition counts batches, not samples.
    global_batch_size = None
    epoch_samples = 0

    def __init__(
        self,
        loader: Any,
        *,
        training: bool,
        divides_batches: bool = False,
        layout: StepLayout = BY_WORKERS,
        **partition_arguments: Any,
    ) -> None:
        features, *data = keras.utils.unpack_x_y_sample_weight(loader.element_spec)[:2]
        data += tf.nest.flatten(features)[:1]  # other features may be scalars
        if any(getattr(spec, "shape", None) == () for spec in tf.nest.flatten(data)):
            raise ValueError(
                f"A tf.data.Dataset must have batches, but has {loader.element_spec}. Register "
                "dataset.batch(n)."
            )
        cardinality = int(loader.cardinality().numpy())
        total = cardinality if cardinality >= 0 else None
        # For validation data of unknown length, each worker counts its own batches.
        counted = layout if training or total is not None else BY_WORKERS
        super().__init__(
            loader,
            total,
            1,
            False,
            training=training,
            layout=StepLayout(1) if divides_batches else counted,
            **partition_arguments,
        )
        self._layout, self._training, self._divides_batches = layout, training, divides_batches
        self._num_begun = 0
        self.compares_samples = not training  # in training, each update compares them

    def __len__(self) -> int:
        if (length := self.steps_left(0)) is None:
            raise TypeError("This data set has an unknown number of batches.")
        return length

    def __iter__(self) -> Iterator[Any]:
        iteration = self._iterate(self._num_begun + 1, epoch=-1)  # not in any epoch
        source_batches = self._copy_for_user()._own_batches(iteration, 0)
        return (batch.content for batch in source_batches)

    def batching(self) -> None:
        return None

    def agree_on_order(self, epoch: int, offset: int, collectives: Collectives) -> None:
        """Make all workers use one order, because some may have started more iterations."""
        self._iterate(-collectives.all_reduce_min(-self._next_order(epoch, offset))[0], epoch)

    def read(self, epoch: int, offset: int, num_steps: int | None = None) -> Iterator[SourceBatch]:
        """Iterate over this worker's batches of `epoch` from `offset` on.

        A data set may shuffle differently in each iteration, so the current iteration continues if
        possible. A new process also starts the iterations of earlier epochs, to get the same order.
        """
        if num_steps is None and not self._training:
            _check_end(self.loader, "validation", "validate(num_steps=...)")
        iteration = self._iterate(self._next_order(epoch, offset), epoch)
        stop = None if num_steps is None else offset + num_steps * self._partition.global_batch_size
        return self._own_batches(iteration, offset, stop)

    def _next_order(self, epoch: int, offset: int) -> int:
        """Return the index of the first iteration that can read `epoch` from `offset`."""
        # Each validation pass is epoch 0 and starts a new iteration.
        iteration, may_continue = self._iteration, self._training or offset > 0
        if iteration is not None and may_continue and iteration.can_continue(epoch, offset):
            return self._num_begun
        return max(self._num_begun, epoch) + 1

    def _iterate(self, order: int, epoch: int) -> _Iteration:
        while self._num_begun < order:
            self._num_begun += 1
            if self._iteration is not None and self._iteration.has_failed:
                mark = self._iteration.mark_at(self._iteration.first_offset)
                self._saved = {**self._saved, "mark": max(self._saved.get("mark", []), mark)}
            self._iteration = _Iteration(self.loader, epoch)
        iteration: _Iteration = self._iteration
        return iteration

    def _own_batches(
        self, iteration: _Iteration, offset: int, stop: int | None = None
    ) -> Iterator[SourceBatch]:
        gives_whole_batches = not self._training and not self._divides_batches
        partition, self.steps_read = self._partition, 0
        size = partition.world_size if gives_whole_batches else partition.global_batch_size
        while stop is None or offset < stop:
            drawn = iteration.read(offset, size if stop is None else min(size, stop - offset))
            self.step_digest = iteration.digest
            mark, saved = iteration.mark_at(offset), self._saved.get("mark", [])
            if saved[:2] == mark[:2] and saved[2:] not in ([], mark[2:]):
                raise RuntimeError(
                    f"Training cannot continue in epoch {mark[0]} after {offset} batches, because "
                    "the data set now gives other samples. Use the same data and batch size, call "
                    "keras.utils.set_random_seed in setup if it shuffles, and load the state in a "
                    "new trainer. Otherwise, load a checkpoint of the end of an epoch."
                )
            if not drawn:
                return
            group_step, self.steps_read = self.steps_read, self.steps_read + 1
            offset += len(drawn)
            if self._training:
                yield from self._own_micro_batches(drawn)
            elif gives_whole_batches:
                yield from map(SourceBatch, drawn[partition.rank : partition.rank + 1])
            elif (own := self._own_batch(drawn)) is not None:
                yield SourceBatch(own, group_step=group_step)

    def _own_micro_batches(self, drawn: list[Any]) -> Iterator[SourceBatch]:
        """Yield this worker's batch of a step, in micro-batches if it is large."""
        partition, sizes = self._partition, [_num_rows(batch) for batch in drawn]
        batch_size = max(sizes)
        if self._divides_batches:
            batch_size = -(-batch_size // self._layout.num_planned_workers(partition.world_size))
        size, rank, shares = partition.world_size, partition.rank, partition.shares
        may_split = partition.may_split and self._layout.keeps_global_batch
        # This partition by samples only plans the step, and the size of its epoch does not matter.
        by_samples = EpochPartition(0, batch_size, size, rank, shares=shares, may_split=may_split)
        plan = by_samples.plan((sum(sizes),))
        own, number = self._own_batch(drawn), len(plan.micro_batches)
        for index in range(number):
            part = own if number == 1 else _slice_rows(own, number, index)
            yield SourceBatch(part, plan=plan)

    def _own_batch(self, drawn: list[Any]) -> Any:
        partition = self._partition
        size, rank, shares = partition.world_size, partition.rank, partition.shares
        if len(drawn) == size and len(set(map(_num_rows, drawn))) == 1 and shares is None:
            return drawn[rank]
        try:
            batch = drawn[0] if len(drawn) == 1 else tf.nest.map_structure(_concatenate, *drawn)
        except tf.errors.InvalidArgumentError as error:
            raise ValueError(
                "The workers cannot share the batches of a step, because their shapes differ: "
                f"{[describe(batch) for batch in drawn]}. Pad all batches to the same shape."
            ) from error
        if not self._training and rank >= _num_rows(batch):
            return None
        return _slice_rows(batch, size, rank, shares)

    def resume_info(self, epoch: int, offset: int) -> Mapping[str, Any]:
        iteration, info = self._iteration, super().resume_info(epoch, offset)
        is_known = offset and iteration is not None and iteration.can_continue(epoch, offset)
        if not is_known or int(self.loader.cardinality()) == tf.data.INFINITE_CARDINALITY:
            return info
        return {**info, "mark": iteration.mark_at(offset)}

    def batch_spec(self) -> Any:
        return self.loader.element_spec

    def fingerprint(self) -> str:
        return f"{self._epoch_size} batches of {self.loader.element_spec}"

    def describe(self) -> str:
        return f"{self.loader!r}, for {self._partition.world_size} workers"


class _Iteration:
    """An iteration over a data set that can repeat the last batches."""

    def __init__(self, loader: Any, epoch: int) -> None:
        self._epoch = epoch
        self.has_failed = False
        self._batches = iter(loader)
        self._repeatable: list[Any] = []  # the batches that can be repeated
        self.first_offset = 0  # of the first such batch
        self._digests = [0]  # of the samples before each such batch, and of all samples
        self.digest = 0  # of the samples up to the newest step
        self._targets: set[Any] = set()  # their values so far, until they differ
        self._num_targets = 0

    def can_continue(self, epoch: int, offset: int) -> bool:
        return self._epoch == epoch and self.first_offset <= offset and not self.has_failed

    def read(self, offset: int, size: int) -> list[Any]:
        """Return up to `size` batches from `offset`, and discard all earlier batches."""
        self.has_failed = True  # unless this returns
        while True:
            while self._repeatable and self.first_offset < offset:
                del self._repeatable[0], self._digests[0]
                self.first_offset += 1
            if len(self._repeatable) >= size or (batch := next(self._batches, None)) is None:
                break
            self._digests.append(self._digest_with(batch))
            self._repeatable.append(batch)
        self.has_failed, drawn = False, self._repeatable[:size]
        self.digest = self._digests[len(drawn)]
        return drawn

    def mark_at(self, offset: int) -> list[Any]:
        """Return the epoch, an offset, and the digest of the samples before it, if it is known."""
        return [self._epoch, offset, *self._digests[offset - self.first_offset :][:1]]

    def _digest_with(self, batch: Any) -> int:
        """Add elements of a batch to the digest: of its targets, because features can be noisy.

        Features count too after many equal targets, which may be placeholders.
        """
        has_target = isinstance(batch, tuple) and len(batch) > 1
        arrays = _sample_elements(batch[1:] if has_target else batch)
        if has_target and len(self._targets) <= 1:
            self._num_targets += _num_rows(batch)
            self._targets.update(zip(*(array.tolist() for array in arrays), strict=False))
            if len(self._targets) == 1 and self._num_targets > _NUM_EQUAL:
                arrays += _sample_elements(batch[0])
        digest = self._digests[-1]
        for array in arrays:
            content = repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
            digest = zlib.crc32(content, digest)
        return digest


def _sample_elements(nest: Any) -> list[Any]:
    arrays = [np.ravel(leaf.numpy()) for leaf in tf.nest.flatten(nest, expand_composites=True)]
    return [array[:: len(array) // _NUM_COMPARED + 1] for array in arrays]


def _concatenate(*columns: Any) -> Any:
    is_sparse = isinstance(columns[0], tf.SparseTensor)
    return tf.sparse.concat(0, list(columns)) if is_sparse else tf.concat(columns, 0)


def _slice_rows(batch: Any, *part: Any) -> Any:
    def slice_leaf(leaf: Any) -> Any:
        # Labeled and unlabeled samples of a batch may differ in number.
        first, stop = part_bounds(int(leaf.shape[0]) or 1, *part)
        if not isinstance(leaf, tf.SparseTensor):
            return leaf[first:stop]
        shape = leaf.dense_shape.numpy()
        return tf.sparse.slice(leaf, [first, *[0] * len(shape[1:])], [stop - first, *shape[1:]])

    return tf.nest.map_structure(slice_leaf, batch)


def _num_rows(batch: Any) -> int:
    return int(tf.nest.flatten(batch)[0].shape[0])
