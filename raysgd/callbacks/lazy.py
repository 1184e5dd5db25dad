"""Importing the package of a callback when it is needed, and saying what is missing."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["import_for"]


def import_for(callback: str, module: str) -> Any:
    """Return a module.

    Raises:
        ImportError: if it is not installed; it names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{callback} needs {module.partition('.')[0]}, which cannot be imported ({error}): "
            'pip install "raysgd[callbacks]"'
        ) from error
