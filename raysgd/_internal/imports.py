"""Imports of large libraries and of optional dependencies."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["frozen_imports", "import_extra"]


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Exclude imported objects from garbage collection, now and later.

    An import creates hundreds of thousands of permanent objects. Scanning them takes 20% of the
    import time of PyTorch and 25% for TensorFlow. Later scans pause training for 0.2 s
    (PyTorch) to 0.5 s (TensorFlow), and write to memory that forked loader processes would
    otherwise share. See :func:`gc.freeze`.
    """
    threshold = gc.get_threshold()
    gc.set_threshold(0)  # not gc.disable(): an imported module can change it
    try:
        yield
    finally:
        gc.freeze()
        if gc.get_threshold()[0] == 0:
            gc.set_threshold(*threshold)


def import_extra(owner: str, module: str, extra: str) -> Any:
    """Import a module that an extra of raysgd installs.

    Args:
        owner: Name of the feature that needs it, for the error.
        module: Name of the module.
        extra: Name of the extra.

    Raises:
        ImportError: If the module is not installed here.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{owner} needs {module.partition('.')[0]}, which cannot be imported here ({error}). "
            "Install it where it is used, on the driver or on every worker: pip install "
            f'"raysgd[{extra}]"'
        ) from error
