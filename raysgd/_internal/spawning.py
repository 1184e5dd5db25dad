"""Processes that a worker spawns, such as those of a DataLoader, and the classes of the script.

Python looks up a class of ``__main__`` by name in the new process. There, ``__main__`` is not the
user's script, because Ray starts the workers. So the class itself is sent.
"""

from __future__ import annotations

import pickle
import types
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle


def send_classes_of_the_script() -> None:
    """Let this process exchange objects of the script's classes with the processes it spawns."""
    ForkingPickler.reducer_override = _reduced  # type: ignore[attr-defined]


def _reduced(pickler: Any, obj: Any) -> Any:
    is_global = isinstance(obj, type | types.FunctionType)
    if is_global and obj.__module__ == "__main__":
        return _received, (cloudpickle.dumps(obj),)
    return NotImplemented


def _received(blob: bytes) -> Any:
    send_classes_of_the_script()  # the new process may return such objects
    return pickle.loads(blob)
