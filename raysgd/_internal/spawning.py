"""Classes of the user's script in processes that a worker spawns, such as those of a DataLoader.

Python looks up classes of ``__main__`` by name, but the ``__main__`` of a worker is Ray's.
"""

from __future__ import annotations

import pickle
import types
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle


def send_classes_of_the_script() -> None:
    """Pickle classes and functions of ``__main__`` by value between this and other processes."""
    ForkingPickler.reducer_override = _reduce  # type: ignore[method-assign]


def _reduce(pickler: Any, obj: Any) -> Any:
    if isinstance(obj, type | types.FunctionType) and obj.__module__ == "__main__":
        return _unpickle, (cloudpickle.dumps(obj),)
    return NotImplemented


def _unpickle(blob: bytes) -> Any:
    send_classes_of_the_script()  # the new process may return such objects
    return pickle.loads(blob)
