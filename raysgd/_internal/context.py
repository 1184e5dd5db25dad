"""Rank and progress of a worker, and the interface of its runner."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from raysgd._internal.step_timing import Totals


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """Ranks and resources of one worker in one generation.

    A generation is the time from one rendezvous to the next, with a fixed set of workers.
    """

    world_rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    generation: int = 0
    distributed: bool = False
    """Whether a process group exists. With ``num_workers=1`` there is none."""
    num_cpus: float = 1
    shares: tuple[float, ...] | None = None
    """Relative shares of the global batch set for nodes, by rank. None means equal shares."""
    is_alone: bool = False
    """Whether the process group has only this worker. True until a new worker joins the others."""
    in_driver: bool = False
    node_ip: str = "127.0.0.1"
    visible_gpus: tuple[str, ...] = ()
    """IDs of the GPUs of all workers on this node, in order. Every worker sees all of them."""
    gpu_index: int | None = None
    """Index of this worker's GPU among `visible_gpus`, or None without a GPU."""


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """What a worker has of the training state."""

    complete: bool = True
    """Whether the worker has all of the state. Otherwise it has shards."""
    condition: Literal["good", "damaged", "lost"] = "good"
    """``damaged`` if an optimizer raised within a step; another worker may have a good state.
    ``lost`` if all workers with some shard of the state were lost."""


@dataclass(frozen=True, kw_only=True)
class LogPoint:
    """What a worker has measured since its last point, for ``fit(log_every=...)``."""

    call_number: int
    global_step: int
    epoch: int  # as `OperatorTrainer.epoch`
    metrics: Any  # packed, unless the worker is in the driver's process; None without metrics
    timing: Totals
    seconds: float  # of training
    reaches_log_step: bool = True  # and the worker is not leaving


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a worker. Another thread reads it while the worker is busy."""

    epoch: int = 0
    in_epoch: bool = False  # whether the worker has started another epoch
    global_step: int = 0
    validation_offset: int = 0  # where the next ``validate`` begins
    num_batches: int = 0  # batches finished in the current call or epoch, whichever began last
    total_batches: int | None = None  # None if unknown
    num_samples: int = 0  # samples finished in the current call or epoch
    epoch_samples: int = 0  # samples of an epoch of training, or 0 if unknown
    step_s: float = 0.0  # mean seconds per step, or 0 if unknown
    samples_per_s: float = 0.0  # samples that this worker computes per second, or 0 if unknown
    snapshot_step: int | None = None  # committed steps in the newest snapshot of this worker
    num_changes: int = 0  # changes between steps that outdated the snapshots of this worker
    split: int = 1  # micro-batches per batch, above 1 after a worker ran out of memory
    latest_metrics: Mapping[str, float] = field(default_factory=dict)  # the first ones
    log_points: Sequence[LogPoint] = ()  # that the driver has not acknowledged
    bad_steps: Sequence[dict[str, Any]] = ()  # steps of the call that were not applied
    holdings: Holdings = Holdings()  # what the worker has of the state
    blocked_on_driver: bool = False  # whether the worker's code has ended or waits for the driver
    terminated_s: float | None = None  # seconds since the process got SIGTERM
    timing: Totals | None = None  # seconds of training by phase
    links: Mapping[str, float] = field(default_factory=dict)  # bytes/s to the hosts of others
    failed_at: str = ""  # the step and the batch in which the newest request failed, as text
    warning: str = ""  # what the newest generation has changed
    collective: int | None = None  # number of the collective that the worker waits for


class Request:
    """A request from the driver to a runner. Subclasses are frozen dataclasses of arguments."""

    @property
    def name(self) -> str:
        """Name for messages: ``train`` for `TrainRequest`."""
        words = type(self).__name__.removesuffix("Request")
        return re.sub(r"(?<!^)(?=[A-Z])", "_", words).lower()

    def for_attempt(self, shares: tuple[float, ...] | None, split: int) -> Request:
        """Return the request with relative shares of the workers, by rank, if it trains.

        `split` is the minimum number of micro-batches per batch, or 0.
        """
        return self


class PausedError(Exception):
    """Raised by a runner that has paused at the requested step."""


class RetrySplitError(Exception):
    """Raised by a runner that ran out of memory in a step and has rolled the step back.

    The caller can repeat the request with each batch split into `split` micro-batches.
    """

    def __init__(self, split: int) -> None:
        super().__init__()
        self.split = split


class Runner(Protocol):
    """Runs a worker's content: an operator, a Keras operator, or a training function.

    `progress`, `request_stop`, `pause_at`, `acquire_snapshot`, and `release_snapshot` run in
    *control* threads while the worker is busy, so they must not wait. The other methods run one at
    a time in the *work* thread.
    """

    def prepare(self, context: WorkerContext) -> None:
        """Adjust the process (threads, devices) before the process group exists."""

    def setup(self, context: WorkerContext) -> None:
        """Create the operator or the function. The process group of this generation exists."""

    def rejoin(self, context: WorkerContext, leader_rank: int) -> None:
        """Join a new generation and load the state of the leader. The process group exists."""

    def progress(self, acknowledged_step: int = -1) -> Progress:
        """Return the progress of the work, without the points up to `acknowledged_step`."""

    def request_stop(self, requested: bool) -> None:
        """Make the current work raise at its next step. False withdraws the request."""

    def pause_at(self, step: int | None) -> int:
        """Make the current call raise PausedError after `step` committed steps. None cancels it.

        Return the current number of committed steps.
        """

    def acquire_snapshot(self, num_changes: int | None = None) -> dict[str, Any] | None:
        """Return the newest snapshot, for a restart after the loss of all workers.

        Return None if there is none, if it was sent, or if `Progress.num_changes` is not
        `num_changes`.
        """
        return None

    def release_snapshot(self, snapshot: dict[str, Any], seconds: float) -> None:
        """Release a snapshot that was sent within `seconds`."""
        return None

    def warm_up(self) -> None:
        """Prepare a replacement worker for its first step in the group, after ``setup``."""
        return None

    def handle(self, request: Request) -> Any:
        """Execute a request and return the answer."""

    def teardown(self) -> None:
        """Release the operator or the function. The process may continue to run (``use_local``)."""
