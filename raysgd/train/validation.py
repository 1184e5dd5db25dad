"""Validation of checkpoints in parallel with training.

Each validation is a Ray task. The driver and the workers read its result by a reference.
"""

from __future__ import annotations

import logging
import multiprocessing.pool
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from raysgd._internal.arguments import check_timeout
from raysgd.callbacks.values import numbers_in
from raysgd.cluster import function_calls as tasks
from raysgd.train.checkpoint import Checkpoint

logger = logging.getLogger(__name__)


class CheckpointConsistencyMode(Enum):
    """What `get_all_reported_checkpoints` waits for."""

    COMMITTED = "COMMITTED"
    """Wait until the driver has handled all reports of this worker."""
    VALIDATED = "VALIDATED"
    """Wait until the requested validations have ended as well."""


class ReportedCheckpointStatus(Enum):
    """State of a reported checkpoint."""

    COMMITTED = "COMMITTED"
    """On disk; no validation was requested."""
    PENDING_VALIDATION = "PENDING_VALIDATION"
    VALIDATED = "VALIDATED"
    VALIDATION_TIMEOUT = "VALIDATION_TIMEOUT"
    VALIDATION_FAILED = "VALIDATION_FAILED"


@dataclass
class ReportedCheckpoint:
    """A checkpoint from `get_all_reported_checkpoints`."""

    checkpoint: Checkpoint
    metrics: dict[str, Any]
    """Numbers of the report and of the validation."""
    status: ReportedCheckpointStatus


@dataclass
class ValidationTaskConfig:
    """Settings of one validation."""

    fn_kwargs: dict[str, Any] | None = None
    """Keyword arguments of the validation function."""
    timeout_s: float | None = None
    """Seconds that the validation may take; None for no limit."""

    def __post_init__(self) -> None:
        self.fn_kwargs = self.fn_kwargs or {}
        if self.timeout_s is not None:
            check_timeout("ValidationTaskConfig", self.timeout_s)


@dataclass
class ValidationConfig:
    """How to validate checkpoints that are reported with ``validation=``."""

    fn: Callable[..., dict[str, Any]]
    """Function that gets a :class:`Checkpoint` and keyword arguments, and returns metrics by name.
    It runs in a Ray task."""
    task_config: ValidationTaskConfig | None = None
    """Default settings of validations. Settings in `report` take precedence."""
    ray_remote_kwargs: dict[str, Any] | None = None
    """Arguments of ``ray.remote`` for the task, such as ``{"num_gpus": 1}``; one CPU by default."""


@dataclass(frozen=True)
class Reported:
    """A checkpoint on disk, as the driver sends it to workers."""

    path: Path
    numbers: Mapping[str, float]
    status: ReportedCheckpointStatus
    task: Any = None
    """The running validation, if any."""

    def as_checkpoint(self) -> ReportedCheckpoint:
        """Return the public object, with the result of the validation if it has ended."""
        found = ReportedCheckpoint(Checkpoint(path=self.path), dict(self.numbers), self.status)
        if self.task is not None and (done := tasks.finished([self.task], 0)):
            found.status, numbers = _result(done[self.task])
            found.metrics |= numbers
        return found


class Validations:
    """The validations of one run, on the driver."""

    def __init__(self, config: Any = None) -> None:
        self._config = config
        self.tasks: dict[str, Any] = {}
        """Running validations, by the name of the checkpoint."""
        self.status: dict[str, ReportedCheckpointStatus] = {}

    def start(self, name: str, blob: bytes, requested: Any) -> None:
        config = self._config.task_config or ValidationTaskConfig()
        own = config if requested is True else requested
        keywords = {**(config.fn_kwargs or {}), **(own.fn_kwargs or {})}
        arguments = self._config.fn, blob, keywords, own.timeout_s
        options = self._config.ray_remote_kwargs or {}
        self.tasks[name] = tasks.start_task(_validate, arguments, options)
        self.status[name] = ReportedCheckpointStatus.PENDING_VALIDATION

    def collect(self, wait: bool = False) -> dict[str, Mapping[str, float]]:
        """Return the metrics of finished validations. With `wait`, first wait for all of them."""
        done = tasks.finished(list(self.tasks.values()), None if wait else 0)
        found: dict[str, Mapping[str, float]] = {}
        for name, task in list(self.tasks.items()):
            if task in done:
                del self.tasks[name]
                self.status[name], found[name] = _result(done[task])
                if self.status[name] is not ReportedCheckpointStatus.VALIDATED:
                    reason = done[task] or "It took longer than its timeout_s."
                    logger.warning("The validation of %s failed: %s", name, reason)
        return found

    def cancel(self) -> None:
        tasks.cancel(list(self.tasks.values()))
        self.tasks.clear()


def _result(value: Any) -> tuple[ReportedCheckpointStatus, Mapping[str, float]]:
    if isinstance(value, BaseException):
        return ReportedCheckpointStatus.VALIDATION_FAILED, {}
    if value is None:
        return ReportedCheckpointStatus.VALIDATION_TIMEOUT, {}
    return ReportedCheckpointStatus.VALIDATED, numbers_in(value)


def _validate(
    function: Callable[..., Any], blob: bytes, keywords: Mapping[str, Any], timeout_s: float | None
) -> Any:
    """Return the metrics of a checkpoint. None after a timeout. Runs in a task."""
    pool = multiprocessing.pool.ThreadPool(1)  # its thread ends with the process of the task
    try:
        result = pool.apply_async(function, (Checkpoint(blob=blob),), keywords)
        pool.close()
        metrics = result.get(timeout_s)
    except multiprocessing.TimeoutError:
        return None
    if not isinstance(metrics, Mapping):
        raise TypeError(f"A validation function must return a dict of metrics, not {metrics!r}.")
    return metrics
