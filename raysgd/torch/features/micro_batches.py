"""Train each batch in parts after memory ran out."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm

from raysgd.data.partition import MicroBatch
from raysgd.loop.feature import MicroBatches
from raysgd.torch.out_of_memory import (
    batch_parts,
    free_memory,
    in_own_containers,
    num_rows,
    ran_out_of_memory,
)

if TYPE_CHECKING:
    from raysgd.torch.train_state import TorchTrainState


_NOT_SPLIT = "raysgd did not repeat the step with smaller parts of the batch, because {}."


class TorchMicroBatches(MicroBatches):
    """Splits batches of tensors in nested containers."""

    _train_state: TorchTrainState
    _num_samples: float = 0
    """Samples of the current batch; 0 if unknown."""

    @functools.cached_property
    def batch_norms(self) -> set[type[torch.nn.Module]]:
        """Types of batch normalization in the models."""
        modules = (module for model in self._train_state.models for module in model.modules())
        return {type(module) for module in modules if isinstance(module, _BatchNorm)}

    @property
    def _smallest_part(self) -> int:
        """Minimum number of samples in a part. Batch normalization fails on a single sample."""
        return 1 if all(issubclass(kind, SyncBatchNorm) for kind in self.batch_norms) else 2

    def _num_parts(self, rows: int) -> int:
        factor, smallest = self.split, self._smallest_part
        return factor if rows and smallest == 1 else max(1, min(factor, rows // smallest))

    def split_batch(self, batch: Any, place: MicroBatch) -> Sequence[tuple[Any, MicroBatch]]:
        # Copy the containers, because user code may remove items from a batch that a retry needs.
        whole = [(in_own_containers(batch), place)]
        self._num_samples = place.size or 0
        is_wanted = self.in_use and self._train_state.settings.options.split_on_oom
        if self.split == 1 or not is_wanted:
            return whole
        factor, rows = self.split, _num_rows(batch, self._num_samples)
        number = self._num_parts(rows)
        # A forward pass may communicate, so all workers make the same number of passes.
        repeats = factor - number if self._train_state.context.world_size > 1 else 0
        if number + repeats == 1:
            return whole
        parts = batch_parts(batch, number) if rows else [in_own_containers(batch)]
        places = place.parts(number, max(rows, 1), factor, repeats)
        parts += [in_own_containers(parts[-1]) for _ in range(repeats)]
        return list(zip(parts, places, strict=True))

    def is_tolerable(self, error: BaseException) -> bool:
        return self._train_state.settings.options.split_on_oom and ran_out_of_memory(error)

    def explain(self, error: BaseException) -> None:
        if "Expected more than 1 value per channel" in str(error):
            error.add_note(
                "Normalization layers cannot train on one value per channel. The last step of an "
                "epoch may have one sample for this worker. Register a DataLoader with "
                "drop_last=True. To continue, save() this trainer and load() the file in a new one."
            )

    def split_after(self, error: BaseException, batch: Any) -> int:
        if not self.is_tolerable(error):
            return 0
        why_not = self.why_not or self._why_not_split(batch)
        if not self.in_use:
            why_not = why_not or "train_epoch is not the default one"
        if self._train_state.step.is_partial:
            why_not = why_not or "memory ran out within the step of an optimizer"
        if why_not:
            error.add_note(_NOT_SPLIT.format(why_not))
            return 0
        return 2 * self.split

    def _why_not_split(self, batch: Any) -> str:
        """Return why a batch cannot be split further. Return "" if it can."""
        try:
            rows = num_rows(batch, self._num_samples)
        except Exception as error:
            return f"the batch cannot be split: {error}"
        if rows // self._smallest_part > self.split:
            return ""
        if self._smallest_part > 1:
            return "batch normalization needs two samples in each part"
        return "each part has one sample" if self.split > 1 else "the batch has one sample"

    def raise_split(self, factor: int) -> None:
        self.split = max(self.split, factor)
        free_memory()
        if self.batch_norms:
            self._train_state.say(
                "batch norm",
                "From now on, batch normalization normalizes parts of a batch, which changes the "
                "result.",
            )


def _num_rows(batch: Any, samples: float = 0) -> int:
    """Return the number of rows of a batch, or 0 if it cannot be split."""
    try:
        return num_rows(batch, samples)
    except Exception:  # classes of user code may raise
        return 0
