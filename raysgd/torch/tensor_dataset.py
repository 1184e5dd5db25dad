"""Tensor data sets that are indexed many samples at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

__all__ = ["Rows", "rows_of"]

_CHUNK_BYTES = 2**20
_CHUNK_BATCHES = 64
"""Limits of one indexing call."""


def rows_of(loader: DataLoader[Any]) -> Rows | None:
    """Return the rows of a loader that only collates rows of tensors; None for other loaders.

    A batch then takes one indexing call per tensor, instead of one per sample and a copy.
    """
    if loader.collate_fn is default_collate and loader.num_workers == 0 and not loader.pin_memory:
        return Rows.of(loader.dataset)
    return None


class Rows:
    """Tensors that are indexed in chunks of several batches."""

    def __init__(self, tensors: tuple[torch.Tensor, ...], subset: torch.Tensor | None) -> None:
        self._tensors = tensors
        self._subset = subset
        rows = max(1, len(tensors[0]))
        self._row_bytes = sum(t.numel() * t.element_size() for t in tensors) // rows

    @classmethod
    def of(cls, dataset: Dataset[Any]) -> Rows | None:
        """Return the rows of a TensorDataset or a Subset of one; None for anything else.

        Sparse and nested tensors do not support indexing of several rows.
        """
        if type(dataset) is TensorDataset:
            if any(tensor.layout is not torch.strided for tensor in dataset.tensors):
                return None
            return cls(dataset.tensors, None)
        if type(dataset) is Subset:
            whole = cls.of(dataset.dataset)
            if whole is not None:
                indices = torch.as_tensor(dataset.indices, dtype=torch.int64)
                inner = whole._subset
                return cls(whole._tensors, indices if inner is None else inner[indices])
        return None

    def batches(
        self, order: torch.Tensor | None, spans: Iterator[tuple[int, int]]
    ) -> Iterator[list[torch.Tensor]]:
        """Yield the batches at `spans` of the order."""
        chunk: list[tuple[int, int]] = []
        size = 0
        for span in spans:
            chunk.append(span)
            size += (span[1] - span[0]) * self._row_bytes
            if size >= _CHUNK_BYTES or len(chunk) == _CHUNK_BATCHES:
                yield from self._fetch(order, chunk)
                chunk, size = [], 0
        if chunk:
            yield from self._fetch(order, chunk)

    def _fetch(
        self, order: torch.Tensor | None, spans: list[tuple[int, int]]
    ) -> Iterator[list[torch.Tensor]]:
        if order is None:
            rows = torch.cat([torch.arange(start, stop) for start, stop in spans])
        else:
            rows = torch.cat([order[start:stop] for start, stop in spans])
        if self._subset is not None:
            rows = self._subset[rows]
        sizes = [stop - start for start, stop in spans]
        columns = [tensor[rows].split(sizes) for tensor in self._tensors]
        return map(list, zip(*columns, strict=True))
