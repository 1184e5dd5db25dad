"""Communication backends by name.

To add a backend, write a class and register it::

    from raysgd.backends import Backend, register_backend

    class MyBackend(Backend): ...

    register_backend("mine", "my_package.my_module:MyBackend")
"""

from __future__ import annotations

import importlib

from raysgd._internal.context import WorkerContext
from raysgd.comm.backend import Backend

__all__ = ["Backend", "WorkerContext", "backend_names", "create_backend", "register_backend"]

_BACKENDS = {
    "gloo": "raysgd.comm.torch:TorchBackend",
    "horovod": "raysgd.comm.horovod:HorovodBackend",
    "nccl": "raysgd.comm.torch:TorchBackend",
    "tensorflow": "raysgd.comm.tensorflow:TensorflowBackend",
}


def register_backend(name: str, target: str) -> None:
    """Register the class at `target`, ``"module:Class"``, as backend `name`.

    raysgd imports the class on first use and calls it with ``(name, timeout_s)``.
    """
    _BACKENDS[name] = target


def backend_names() -> list[str]:
    """Return the names that `create_backend` accepts."""
    return sorted(_BACKENDS)


def create_backend(name: str, timeout_s: float) -> Backend:
    """Create the backend `name`. `timeout_s` limits each collective, in seconds.

    Raises:
        ValueError: If no backend has this name.
    """
    if name not in _BACKENDS:
        raise ValueError(f"backend={name!r}: must be one of {', '.join(backend_names())}.")
    module, _, attribute = _BACKENDS[name].partition(":")
    backend: Backend = getattr(importlib.import_module(module), attribute)(name, timeout_s)
    return backend
