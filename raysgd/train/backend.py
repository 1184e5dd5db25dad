"""Backends, which set up a framework on the workers before a training function runs."""

from raysgd.train.executor import BackendExecutor as BackendExecutor
from raysgd.train.framework import Backend as Backend
from raysgd.train.framework import BackendConfig as BackendConfig
from raysgd.train.framework import InactiveWorkerGroupError as InactiveWorkerGroupError
from raysgd.train.framework import TrainBackendError as TrainBackendError
from raysgd.train.framework import TrainingWorkerError as TrainingWorkerError
from raysgd.train.worker_group import WorkerGroup as WorkerGroup

__all__ = sorted(name for name, value in globals().items() if callable(value))
