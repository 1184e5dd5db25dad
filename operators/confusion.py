"""Confusion matrices, and what is computed from them."""

from __future__ import annotations

import torch

__all__ = ["accuracy", "confusion_matrix", "macro_f1", "mean_iou"]


def confusion_matrix(
    predicted: torch.Tensor, target: torch.Tensor, num_classes: int, ignore_index: int = -100
) -> torch.Tensor:
    """Count for each class (row) how often each class (column) was predicted for it.

    Args:
        predicted: classes, of any shape.
        target: classes, of the same shape; where it is `ignore_index` nothing is counted.
        num_classes: number of classes.
        ignore_index: what marks positions that do not count.

    >>> confusion_matrix(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), num_classes=2)
    tensor([[1, 1],
            [0, 1]])
    """
    size = num_classes**2
    # one place more for what is not counted: leaving it out would wait for the device
    place = torch.where(target == ignore_index, size, target * num_classes + predicted)
    counts = torch.bincount(place.reshape(-1), minlength=size + 1)
    return counts[:size].reshape(num_classes, num_classes)


def accuracy(confusion: torch.Tensor) -> float:
    """Return the share of positions that were predicted right."""
    total = float(confusion.sum())
    return float(confusion.diagonal().sum()) / total if total else float("nan")


def mean_iou(confusion: torch.Tensor) -> float:
    """Return the mean over classes of intersection over union.

    Of a class these are the positions that are and were predicted as it, and those that are or
    were predicted as it (mean IU of Long et al. 2015, "Fully Convolutional Networks for Semantic
    Segmentation", arXiv:1411.4038). Classes that occur in neither are left out.
    """
    hit = confusion.diagonal()
    return _mean_where(hit, confusion.sum(dim=0) + confusion.sum(dim=1) - hit)


def macro_f1(confusion: torch.Tensor) -> float:
    """Return the mean over classes of F1, ``2 hits / (predicted + occurring)``.

    Classes that neither occur nor were predicted are left out.
    """
    return _mean_where(2 * confusion.diagonal(), confusion.sum(dim=0) + confusion.sum(dim=1))


def _mean_where(part: torch.Tensor, whole: torch.Tensor) -> float:
    there = whole > 0
    return float((part[there].double() / whole[there].double()).mean())
