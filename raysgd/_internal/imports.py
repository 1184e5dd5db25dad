"""Imports of large libraries in a worker process, and of those that an extra brings."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["frozen_imports", "import_extra"]


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


def import_extra(owner: str, module: str, extra: str) -> Any:
    """Import what an extra brings.

    Args:
        owner: what needs it, for the error.
        module: its name.
        extra: name of the extra.

    Raises:
        ImportError: if it is not installed here.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{owner} needs {module.partition('.')[0]}, which cannot be imported here ({error}). "
            "Install it where it is used, on the driver or on every worker: pip install "
            f'"raysgd[{extra}]"'
        ) from error
