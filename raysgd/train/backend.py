"""Backends, which set up a framework on the workers before a training function runs."""

import inspect
import logging
import pkgutil
from typing import Any

from raysgd._internal.imports import lazy_names
from raysgd.backends import CollectiveBackend
from raysgd.errors import RaySGDError, WorkerLostError
from raysgd.train.worker_group import WorkerGroup

__all__ = [
    "Backend",
    "BackendConfig",
    "BackendExecutor",  # noqa: F822 (imported lazily, because its module imports this one)
    "InactiveWorkerGroupError",
    "TrainBackendError",
    "TrainingWorkerError",
    "WorkerGroup",
]
__getattr__ = lazy_names(__name__, {"BackendExecutor": "raysgd.train.executor:BackendExecutor"})

logger = logging.getLogger(__name__)

CONFIGS = {
    "torch": "raysgd.train.torch:TorchConfig",
    "tensorflow": "raysgd.train.tensorflow:TensorflowConfig",
    "horovod": "raysgd.train.horovod:HorovodConfig",
}
"""Config class of each named backend; imported on first use."""


class TrainBackendError(RaySGDError, RuntimeError):
    """Code called methods of the executor in the wrong order."""


class InactiveWorkerGroupError(RaySGDError, RuntimeError):
    """The executor has no workers: it was not started, or was shut down."""


TrainingWorkerError = WorkerLostError
"""Older name. A run raises it if it loses workers more often than ``max_retries`` allows."""


class Backend:
    """Sets up a framework on the workers. Both hooks run on the driver."""

    share_cuda_visible_devices: bool = False
    """Whether each worker sees the GPUs of all workers on its node, in the same order."""

    def on_start(self, worker_group: WorkerGroup, backend_config: Any) -> None:
        """Set up the workers after each start and restart."""

    def on_shutdown(self, worker_group: WorkerGroup, backend_config: Any) -> None:
        """Clean up before the workers stop. Not called for lost workers."""

    @staticmethod
    def encode_data(data_dict: dict[str, Any]) -> Any:
        """Encode a report or checkpoint for its transfer to the driver. Runs on the worker."""
        return data_dict

    @staticmethod
    def decode_data(data_dict: Any) -> dict[str, Any]:
        """Decode the output of `encode_data` into a dict. Runs on the driver."""
        decoded: dict[str, Any] = data_dict
        return decoded


class BackendConfig:
    """Base class for the settings of a `Backend`."""

    timeout_s: float = 1800
    """Seconds that the setup of the workers may take."""

    @property
    def backend_cls(self) -> type[Backend]:
        """The class of the backend. A method that returns the class works as well."""
        return Backend

    def collective_backend(self, use_gpu: bool = False) -> CollectiveBackend | None:
        """Return the `CollectiveBackend` of `raysgd.backends` that connects the workers, or None.

        Runs on the driver. With one, raysgd wakes workers that wait for a failed worker.
        Return None if `on_start` sets up everything.
        """
        return None


def backend_class(config: BackendConfig) -> type[Backend]:
    backend_cls: Any = config.backend_cls
    if not inspect.isclass(backend_cls) and callable(backend_cls):
        backend_cls = backend_cls()
    if not inspect.isclass(backend_cls) or not issubclass(backend_cls, Backend):
        raise TypeError(
            f"{type(config).__name__}.backend_cls={backend_cls!r}: must be a subclass of "
            "raysgd.train.backend.Backend."
        )
    if hasattr(backend_cls, "handle_failure"):  # of Ray Train 1
        logger.warning(
            "raysgd does not call %s.handle_failure. After a failure, raysgd calls on_start again.",
            backend_cls.__name__,
        )
    return backend_cls


def as_backend_config(backend: Any) -> BackendConfig:
    """Return the config for the ``backend`` argument of a trainer."""
    if isinstance(backend, BackendConfig):
        return backend
    if not isinstance(backend, str) or backend not in CONFIGS:
        kind = ValueError if isinstance(backend, str) else TypeError
        names = ", ".join(sorted(CONFIGS))
        raise kind(f"backend={backend!r}: must be one of {names}, or a BackendConfig.")
    config: BackendConfig = pkgutil.resolve_name(CONFIGS[backend])()
    return config
