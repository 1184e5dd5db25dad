"""Packages that only some operators need."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["optional_module"]


def optional_module(name: str, owner: str) -> Any:
    """Import a package that the extra ``operators`` brings.

    Args:
        name: its name.
        owner: what needs it, for the error.

    Raises:
        ImportError: if it is not installed here.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{owner} needs {name}, and it cannot be imported here ({error}). Install it in the "
            'Python of the driver and of every worker: pip install "raysgd[operators]"'
        ) from error
