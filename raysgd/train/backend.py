"""Backends, which set up a framework on the workers before a training function runs."""

from raysgd.train.executor import BackendExecutor
from raysgd.train.framework import (
    Backend,
    BackendConfig,
    InactiveWorkerGroupError,
    TrainBackendError,
    TrainingWorkerError,
)
from raysgd.train.worker_group import WorkerGroup

__all__ = [
    "Backend",
    "BackendConfig",
    "BackendExecutor",
    "InactiveWorkerGroupError",
    "TrainBackendError",
    "TrainingWorkerError",
    "WorkerGroup",
]
