"""Imports of large libraries in a worker process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["frozen_imports"]


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Keep the garbage collector from looking through what is imported, now and later.

    An import makes objects by the hundred thousand, which all stay. To look for garbage among
    them costs a fifth of the time that importing torch takes, a quarter of TensorFlow's, and
    after it 0.2 s (torch) to 0.5 s (TensorFlow) at some moments of training; and it writes to
    memory that forked loader processes would otherwise share. See :func:`gc.freeze`.
    """
    threshold = gc.get_threshold()
    gc.set_threshold(0)  # no switch: what is loaded may turn that off, for good
    try:
        yield
    finally:
        gc.freeze()
        if gc.get_threshold()[0] == 0:
            gc.set_threshold(*threshold)
