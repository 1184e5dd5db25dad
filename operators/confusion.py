"""Confusion matrices, and metrics computed from them."""

from __future__ import annotations

import torch


def check_classes(owner: str, scores: torch.Tensor, num_classes: int) -> None:
    """Raise ValueError unless a model gives one score per class."""
    if scores.shape[1] != num_classes:
        raise ValueError(
            f"{owner}: the model gives scores for {scores.shape[1]} classes, but "
            f"config['num_classes'] is {num_classes}."
        )


def confusion_matrix(
    predicted: torch.Tensor, target: torch.Tensor, num_classes: int, ignore_index: int = -100
) -> torch.Tensor:
    """Count how often each class (row) was predicted as each class (column).

    `predicted` and `target` have the same shape. Positions with target `ignore_index` do not count.

    >>> confusion_matrix(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), num_classes=2)
    tensor([[1, 1],
            [0, 1]])
    """
    size = num_classes**2
    # Count ignored positions in an extra bin, because filtering them would wait for the device.
    place = torch.where(target == ignore_index, size, target * num_classes + predicted)
    counts = torch.bincount(place.reshape(-1), minlength=size + 1)
    return counts[:size].reshape(num_classes, num_classes)


def accuracy(confusion: torch.Tensor) -> float:
    """Return the fraction of positions that were predicted correctly."""
    total = float(confusion.sum())
    return float(confusion.diagonal().sum()) / total if total else float("nan")


def mean_iou(confusion: torch.Tensor) -> float:
    """Return the mean intersection over union of the classes (Long et al. 2015, arXiv:1411.4038).

    Classes that neither occur nor were predicted do not count.
    """
    hit = confusion.diagonal()
    return _mean_where(hit, confusion.sum(dim=0) + confusion.sum(dim=1) - hit)


def macro_f1(confusion: torch.Tensor) -> float:
    """Return the mean F1 of the classes, ``2 hits / (predicted + occurring)``.

    Classes that neither occur nor were predicted do not count.
    """
    return _mean_where(2 * confusion.diagonal(), confusion.sum(dim=0) + confusion.sum(dim=1))


def _mean_where(part: torch.Tensor, whole: torch.Tensor) -> float:
    there = whole > 0
    return float((part[there].double() / whole[there].double()).mean())
