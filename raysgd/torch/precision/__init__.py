"""The supported precisions. To add one, write a file and add a line here."""

from raysgd.torch.precision.apex import ApexAmp
from raysgd.torch.precision.base import Precision, to_full_precision
from raysgd.torch.precision.native import NativeAmp

__all__ = ["PRECISIONS", "Precision", "to_full_precision"]

PRECISIONS: dict[bool | str, type[Precision]] = {
    False: Precision,
    True: NativeAmp,
    "apex": ApexAmp,
}
"""Allowed values of ``use_fp16``. Each class takes a device and ``amp_dtype``."""
