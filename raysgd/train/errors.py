"""Errors of the executor, with the names of Ray Train."""

from __future__ import annotations

from raysgd.errors import RaySGDError, WorkerLostError

__all__ = ["InactiveWorkerGroupError", "TrainBackendError", "TrainingWorkerError"]


class TrainBackendError(RaySGDError, RuntimeError):
    """Code called methods of the executor in the wrong order."""


class InactiveWorkerGroupError(RaySGDError, RuntimeError):
    """The executor has no workers: it was not started, or was shut down."""


class TrainingWorkerError(WorkerLostError, TrainBackendError):
    """A run lost workers more often than ``max_retries``. The message lists the causes."""
