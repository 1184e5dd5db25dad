"""Communication backends by name."""

import pkgutil

from raysgd._internal.runner import WorkerContext
from raysgd.comm.backend import CollectiveBackend

__all__ = ["CollectiveBackend", "WorkerContext", "backend_names", "create_backend"]

_BACKENDS = {
    "gloo": "raysgd.comm.torch:TorchCollectiveBackend",
    "horovod": "raysgd.comm.horovod:HorovodBackend",
    "nccl": "raysgd.comm.torch:TorchCollectiveBackend",
    "tensorflow": "raysgd.comm.tensorflow:TensorflowBackend",
}


def backend_names() -> list[str]:
    """Return the names that `create_backend` accepts."""
    return sorted(_BACKENDS)


def create_backend(name: str, timeout_s: float) -> CollectiveBackend:
    """Create the backend `name`. `timeout_s` limits each collective, in seconds.

    Raises:
        ValueError: If no backend has this name.
    """
    if name not in _BACKENDS:
        raise ValueError(f"backend={name!r}: must be one of {', '.join(backend_names())}.")
    backend: CollectiveBackend = pkgutil.resolve_name(_BACKENDS[name])(name, timeout_s)
    return backend
