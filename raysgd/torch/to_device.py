"""Move batches to a device."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["move_to_device"]


def move_to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch on a device, also with tensors in containers or objects with ``to``."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, tuple) and hasattr(batch, "_fields") and not callable(_to(batch)):
        return type(batch)(*(move_to_device(item, device) for item in batch))
    if callable(to := _to(batch)):
        return to(device)
    if isinstance(batch, tuple | list):
        return type(batch)(move_to_device(item, device) for item in batch)
    if isinstance(batch, dict):
        return {key: move_to_device(item, device) for key, item in batch.items()}
    return batch


def _to(batch: Any) -> Any:
    return getattr(batch, "to", None)
