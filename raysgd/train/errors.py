"""The errors of the executor, by the names that users of Ray Train's know."""

from __future__ import annotations

from raysgd.errors import RaySGDError, WorkerLostError

__all__ = ["InactiveWorkerGroupError", "TrainBackendError", "TrainingWorkerError"]


class TrainBackendError(RaySGDError, RuntimeError):
    """The executor's methods were called in an order that makes no sense."""


class InactiveWorkerGroupError(RaySGDError, RuntimeError):
    """There are no workers: the executor was not started, or was shut down."""


class TrainingWorkerError(WorkerLostError, TrainBackendError):
    """More workers were lost in one run than ``max_retries``; the message has every cause."""
