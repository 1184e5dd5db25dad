"""The buffers of a model in a step with equal bits, such as running statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from raysgd.data.partition import EpochPartition
from raysgd.torch.strategies.tree_sum import TreeSum, sum_over_workers
from raysgd.torch.tensors import copy_leaf, version_of
from raysgd.torch.train_state import TorchTrainState


class EqualBitsBuffers:
    """The buffers after each part. Each part begins with the buffers of the step's start."""

    def __init__(self, train_state: TorchTrainState) -> None:
        self._train_state = train_state
        self.clear()

    def clear(self) -> None:
        """Forget the parts of a step."""
        self._stored: dict[int, list[torch.Tensor | None]] = {}

    def begin(self, part: int, is_first: bool) -> None:
        """Restore the buffers that a part begins with, unless it `is_first`."""
        self.part = part
        self._start = self._stored.get(part, self._train_state.buffer_copies.values)
        if not is_first:
            self._train_state.buffer_copies.write(self._start)
        self._versions = self._newest_versions()

    def check_unchanged(self) -> None:
        """Raise RuntimeError if buffers have changed since the last call of another method."""
        if self._versions != self._newest_versions():
            raise RuntimeError(
                'exact="bits": train_batch changes buffers after self.optimizer_step, for example '
                "by a forward pass in train mode. Change them before it."
            )

    def _newest_versions(self) -> list[Any]:
        buffers = self._train_state.buffer_copies.tensors()
        return [None if b is None else (b.data_ptr(), version_of(b)) for b in buffers]

    def store(self) -> None:
        """Store the buffers that the part has changed."""
        # Compare contents, because kernels such as that of BatchNorm do not count versions.
        newest = zip(self._start, self._train_state.buffer_copies.tensors(), strict=True)
        self._stored[self.part] = [
            before if _is_equal(before, after) else copy_leaf(after) for before, after in newest
        ]
        self._versions = self._newest_versions()

    def changes(self) -> list[int]:
        """Return for each buffer how to merge it, as numbers of which the largest counts."""
        changes = []
        for index, before in enumerate(self._train_state.buffer_copies.values):
            kept = [each[index] for each in self._stored.values()]
            changes.append(max((_change(before, after) for after in kept), default=0))
        return changes

    def merge(self, changes: Sequence[int], partition: EpochPartition) -> None:
        """Set floats to their old values and the mean of the changes, others as in part 0."""
        if not any(changes):
            return
        before: list[Any] = self._train_state.buffer_copies.values
        merged, first = list(before), self._stored.get(0, before)
        is_distributed = dist.is_initialized()
        means, others, objects = ([i for i, c in enumerate(changes) if c == k] for k in (1, 2, 3))
        if means:
            total = self._mean_change(means, partition)
            for i, change in zip(means, total, strict=True):
                merged[i] = before[i] + change
        if others:
            values: Any = torch.cat([first[i].reshape(-1).to(torch.int64) for i in others])
            if is_distributed:
                dist.broadcast(values, 0)
            pieces = values.split([before[i].numel() for i in others])
            for i, piece in zip(others, pieces, strict=True):
                merged[i] = piece.view(before[i].shape).to(before[i].dtype)
        if objects:
            contents = [first[i] for i in objects]
            if is_distributed:
                contents = self._train_state.collectives.broadcast(lambda: contents, 0)
            for i, value in zip(objects, contents, strict=True):
                merged[i] = value
        self.clear()
        self._train_state.buffer_copies.write(merged)
        self._versions = self._newest_versions()

    def _mean_change(
        self, indices: Sequence[int], partition: EpochPartition
    ) -> Sequence[torch.Tensor]:
        before: list[Any] = self._train_state.buffer_copies.values
        plan, owned, tree = self._train_state.update.plan, partition.owned_parts, TreeSum()
        for position, part in enumerate(owned):
            num_samples = sum(m.num_samples or 0 for m in plan.batches[position :: len(owned)])
            after: list[Any] = self._stored.get(part, before)
            weight = num_samples / (plan.total_samples or 1)
            tree.add(0, part, [(after[i] - before[i]) * weight for i in indices])
        assert partition.layout.num_parts is not None
        return sum_over_workers(tree, partition.layout.num_parts, partition.shares)


def _is_equal(before: torch.Tensor | None, after: torch.Tensor | None) -> bool:
    if before is None or after is None:
        return before is after
    return before.dtype == after.dtype and torch.equal(before, after)


def _change(before: torch.Tensor | None, after: torch.Tensor | None) -> int:
    """Return how to merge a buffer: 0 not at all, 1 by means, 2 by values, 3 as an object."""
    if after is before:
        return 0
    if before is None or after is None:
        return 3
    if (before.shape, before.dtype) != (after.shape, after.dtype):
        return 3
    return 1 if before.is_floating_point() or before.is_complex() else 2
