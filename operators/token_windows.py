"""A dataset that cuts a long text into sequences."""

from __future__ import annotations

import torch
from torch.nn import functional
from torch.utils.data import Dataset

__all__ = ["TokenWindows"]


class TokenWindows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Cuts a text into sequences. Each token except the first is a target once.

    Samples are ``(tokens, targets)``. The last sequence is padded with targets that do not count.

    >>> [sample[1].tolist() for sample in TokenWindows(torch.arange(6), length=3)]
    [[1, 2, 3], [4, 5, -100]]

    Args:
        tokens: One-dimensional tensor of ints, with at least two tokens.
        length: Tokens per sequence.
        ignore_index: Target of padding.

    Raises:
        ValueError: If there are too few tokens, or they are not ints.
    """

    def __init__(self, tokens: torch.Tensor, length: int, ignore_index: int = -100) -> None:
        if tokens.is_floating_point() or len(tokens) < 2:
            raise ValueError(
                f"TokenWindows needs at least two tokens, as ints, but got {len(tokens)} of "
                f"{tokens.dtype}."
            )
        self.tokens = tokens
        self.length = length
        self.ignore_index = ignore_index

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // self.length)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.length
        window = self.tokens[start : start + self.length + 1].long()
        missing = self.length + 1 - len(window)
        return (
            functional.pad(window[:-1], (0, missing)),
            functional.pad(window[1:], (0, missing), value=self.ignore_index),
        )
