"""Backends: what is set up on the workers before a training function runs.

A backend of one's own is two small classes::

    from dataclasses import dataclass
    from raysgd.train.backend import Backend, BackendConfig

    class MyBackend(Backend):
        def on_start(self, worker_group, backend_config):
            worker_group.execute(set_up, backend_config.port)

    @dataclass
    class MyConfig(BackendConfig):
        port: int = 1234

        @property
        def backend_cls(self):
            return MyBackend

    Trainer(MyConfig(), num_workers=2)

Named backends, as in ``Trainer("torch")``, are lines in `CONFIGS`.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from typing import TYPE_CHECKING, Any

from raysgd.backends import Backend as Transport
from raysgd.train.errors import InactiveWorkerGroupError, TrainBackendError, TrainingWorkerError
from raysgd.train.worker_group import WorkerGroup

if TYPE_CHECKING:
    from raysgd.train.executor import BackendExecutor

__all__ = [
    "Backend",
    "BackendConfig",
    "BackendExecutor",
    "InactiveWorkerGroupError",
    "TrainBackendError",
    "TrainingWorkerError",
    "WorkerGroup",
    "backend_class",
    "checked_config",
]

logger = logging.getLogger(__name__)

CONFIGS = {
    "torch": "raysgd.train.torch:TorchConfig",
    "tensorflow": "raysgd.train.tensorflow:TensorflowConfig",
    "horovod": "raysgd.train.horovod:HorovodConfig",
}
"""The configs of the backends that have a name; each is imported when it is first used."""


class Backend:
    """Sets a framework up on the workers. Both methods run on the driver and may do nothing."""

    share_cuda_visible_devices: bool = False
    """Whether each worker sees the GPUs of all workers of its node, in one order."""

    def on_start(self, worker_group: WorkerGroup, backend_config: Any) -> None:
        """Set up, when the workers have started; again whenever they have restarted."""

    def on_shutdown(self, worker_group: WorkerGroup, backend_config: Any) -> None:
        """Clean up, before the workers are ended; not where they were lost."""

    @staticmethod
    def encode_data(data_dict: dict[str, Any]) -> Any:
        """Return what is reported or saved as it shall travel: a dict, bytes. Runs on the worker.

        Beside that, tensors of a device travel to the CPU, and models without their
        DistributedDataParallel.
        """
        return data_dict

    @staticmethod
    def decode_data(data_dict: Any) -> dict[str, Any]:
        """Return what has travelled as the driver shall see it: a dict."""
        decoded: dict[str, Any] = data_dict
        return decoded


class BackendConfig:
    """Says which Backend to use, and holds its settings; subclass it."""

    @property
    def backend_cls(self) -> type[Backend]:
        """The class of the backend; a plain method that returns it will do as well."""
        return Backend

    def transport(self, use_gpu: bool = False) -> Transport | None:
        """Return the :class:`raysgd.backends.Backend` by which the workers communicate.

        Runs on the driver; `use_gpu` says whether the workers reserve GPUs. With a transport,
        workers that wait for each other are woken when another fails. None where the backend's
        `on_start` sets up all there is.
        """
        return None

    @property
    def timeout(self) -> float:
        """Bound of the workers' setup, in seconds."""
        return float(getattr(self, "timeout_s", 1800))


def backend_class(config: BackendConfig) -> type[Backend]:
    """Return the class of a config's backend, by whichever way the config says it.

    Raises:
        TypeError: if it is no subclass of Backend.
    """
    found: Any = config.backend_cls
    if not inspect.isclass(found) and callable(found):
        found = found()
    if not inspect.isclass(found) or not issubclass(found, Backend):
        raise TypeError(
            f"{type(config).__name__}.backend_cls is {found!r}: must be a subclass of "
            "raysgd.train.backend.Backend."
        )
    if hasattr(found, "handle_failure"):
        logger.warning(
            "%s.handle_failure is not called. After a failure the workers restart, and on_start is "
            "called again.",
            found.__name__,
        )
    return found


def checked_config(backend: Any) -> BackendConfig:
    """Return the config that a trainer's ``backend`` stands for.

    Raises:
        ValueError: if it is the name of none.
        TypeError: if it is neither a name nor a config.
        ImportError: if what it needs is not installed.
    """
    if isinstance(backend, BackendConfig):
        return backend
    if not isinstance(backend, str):
        raise TypeError(
            f"backend={backend!r}: must be a BackendConfig or one of {', '.join(sorted(CONFIGS))}."
        )
    if backend not in CONFIGS:
        raise ValueError(
            f"backend={backend!r}: must be one of {', '.join(sorted(CONFIGS))}, or a BackendConfig."
        )
    module, _, name = CONFIGS[backend].partition(":")
    config: BackendConfig = getattr(importlib.import_module(module), name)()
    return config


def __getattr__(name: str) -> Any:
    if name == "BackendExecutor":  # it needs this module
        return importlib.import_module("raysgd.train.executor").BackendExecutor
    raise AttributeError(f"module 'raysgd.train.backend' has no attribute {name!r}")
