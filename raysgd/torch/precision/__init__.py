"""The supported precisions. To add one, write a file and add a line here."""

from __future__ import annotations

from collections.abc import Callable

import torch

from raysgd.torch.precision.base import Precision
from raysgd.torch.precision.native import NativeAmp

__all__ = ["PRECISIONS", "Precision", "create_precision"]

PRECISIONS: dict[bool | str, Callable[[torch.device, torch.dtype | None], Precision]] = {
    False: Precision,
    True: NativeAmp,
}
"""Allowed values of ``use_fp16``. Each class takes a device and ``amp_dtype``."""


def create_precision(
    use_fp16: bool | str, device: torch.device, dtype: torch.dtype | None = None
) -> Precision:
    return PRECISIONS[use_fp16](device, dtype)
