"""Split batches of tensors after memory ran out, and tell what cannot be split."""

import functools
import gc
from typing import Any

import numpy as np
import torch
from torch.nn import SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm

from raysgd.data.partition import MicroBatchPlan, part_bounds
from raysgd.data.source import SourceBatch
from raysgd.loop.micro_batching import MicroBatches, MicroBatching
from raysgd.torch.input.batches import map_batch
from raysgd.torch.options import TorchSettings

_MESSAGES = ("DefaultCPUAllocator: ", "CUDA error: out of memory", "_ALLOC_FAILED")
"""Messages that identify errors without their own class."""
_NOT_SPLIT = "raysgd did not repeat the step with smaller parts of the batch, because {}."


class TorchMicroBatching(MicroBatching):
    """Splits batches of tensors in nested containers."""

    _settings: TorchSettings
    _num_samples: float = 0
    """Samples of the current batch; 0 if unknown."""

    @functools.cached_property
    def batch_norms(self) -> set[type[torch.nn.Module]]:
        """Types of batch normalization in the models."""
        modules = (module for model in self._train_state.models for module in model.modules())
        return {type(module) for module in modules if isinstance(module, _BatchNorm)}

    @property
    def _min_micro_batch_size(self) -> int:
        """Minimum number of samples. Batch normalization fails on a single sample."""
        return 1 if all(issubclass(kind, SyncBatchNorm) for kind in self.batch_norms) else 2

    def split_batch(
        self, source_batch: SourceBatch, micro_batch: MicroBatchPlan, may_split: bool
    ) -> MicroBatches:
        # Copy the containers, because user code may remove items from a batch that a retry needs.
        batch = source_batch.content
        unsplit = [(copy_containers(batch), micro_batch)]
        self._num_samples = source_batch.num_collated_samples or micro_batch.num_samples or 0
        if self.num_splits == 1 or not (may_split and self._settings.options.split_on_oom):
            return unsplit
        rows = num_rows(batch, self._num_samples)
        num_filled = max(1, min(self.num_splits, rows // self._min_micro_batch_size))
        # A forward pass may communicate, so all workers make the same number of passes.
        repeats = self.num_splits - num_filled if self._settings.context.world_size > 1 else 0
        if num_filled + repeats == 1:
            return unsplit
        spans = [part_bounds(max(rows, 1), num_filled, index) for index in range(num_filled)]
        batches = [rows_of(batch, *span) if rows else copy_containers(batch) for span in spans]
        batches += [copy_containers(batches[-1]) for _ in range(repeats)]
        sizes = [stop - first for first, stop in spans] + [0] * repeats
        return list(zip(batches, micro_batch.split(sizes), strict=True))

    def is_recoverable(self, error: BaseException) -> bool:
        return self._settings.options.split_on_oom and is_oom_error(error)

    def choose_num_splits(self, error: BaseException, batch: Any, may_split: bool) -> int:
        if "Expected more than 1 value per channel" in str(error):
            error.add_note(
                "Normalization layers cannot train on one value per channel. The last step of an "
                "epoch may have one sample for this worker. Register a DataLoader with "
                "drop_last=True. To continue, save() this trainer and load() the file in a new one."
            )
        if batch is None or not self.is_recoverable(error):
            return 0
        why_not, rows = self.why_not_split, num_rows(batch, self._num_samples)
        if rows // self._min_micro_batch_size <= self.num_splits:
            too_few = "smaller parts would have too few samples"
            why_not = why_not or (too_few if rows else "the batch cannot be split")
        if not may_split:
            why_not = why_not or "train_epoch is not the default one"
        if self._train_state.is_damaged:
            why_not = why_not or "memory ran out within the step of an optimizer"
        if why_not:
            error.add_note(_NOT_SPLIT.format(why_not))
            return 0
        return 2 * self.num_splits

    def increase_num_splits(self, min_splits: int) -> None:
        self.num_splits = max(self.num_splits, min_splits)
        gc.collect()  # tensors in reference cycles
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        if self.batch_norms:
            self._settings.warn_once(
                "batch norm",
                "From now on, batch normalization normalizes parts of a batch, which changes the "
                "result.",
            )


def is_oom_error(error: BaseException) -> bool:
    """Return whether an exception reports that GPU or process memory is exhausted."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    inner = getattr(error, "inner_exception", None)  # torch.compile wraps the original error
    if isinstance(inner, BaseException):
        return is_oom_error(inner)
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)


def num_rows(batch: Any, samples: float = 0) -> int:
    """Return the size of the first dimension that all tensors of a batch share.

    Return 0 if the batch cannot be split. `samples` is the number of samples in the batch, or 0 if
    unknown.
    """
    shapes: set[tuple[int, ...]] = set()

    def measure(leaf: Any) -> None:
        if leaf is not None:
            is_tensor = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
            shapes.add(leaf.shape[:2] if is_tensor or isinstance(leaf, np.ndarray) else (0,))

    try:
        map_batch(batch, measure)
    except Exception:  # classes of user code may raise
        return 0
    rows, *others = {shape[0] if shape else 0 for shape in shapes} or {0}
    if samples not in (0, rows) and {shape[1:] for shape in shapes} == {(samples,)}:
        return 0  # dimension 0 is the time
    return 0 if others or (samples not in (0, rows) and _has_one_each(batch, samples)) else rows


def _has_one_each(batch: Any, samples: float) -> bool:
    """Return whether a list or tuple in a batch holds one tensor per sample."""
    if isinstance(batch, dict):
        batch = list(batch.values())
    elif type(batch) not in (tuple, list):
        return False
    elif len(batch) == samples and all(isinstance(item, torch.Tensor) for item in batch):
        return True
    return any(_has_one_each(item, samples) for item in batch)


def rows_of(batch: Any, start: int, stop: int) -> Any:
    return map_batch(batch, lambda leaf: None if leaf is None else leaf[start:stop])


def copy_containers(batch: Any) -> Any:
    """Return a copy of the containers of a batch, with the same tensors and other objects."""
    try:
        return map_batch(batch, lambda leaf: leaf)
    except Exception:  # classes of user code may raise
        return batch
