"""PrintCallback, by the module that older scripts import it from."""

from __future__ import annotations

from raysgd.train.callbacks.printing import PrintCallback

__all__ = ["PrintCallback"]
