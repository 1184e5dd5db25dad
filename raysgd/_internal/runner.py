"""What a worker runs, with which ranks and resources, and how it answers the driver."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

from raysgd._internal.worker_status import WorkerStatus


class Request:
    """A request from the driver to a runner. Subclasses are frozen dataclasses of arguments."""

    @property
    def name(self) -> str:
        """Name for messages: ``train`` for `TrainRequest`."""
        words = type(self).__name__.removesuffix("Request")
        return re.sub(r"(?<!^)(?=[A-Z])", "_", words).lower()

    def for_attempt(self, shares: tuple[float, ...] | None, min_splits: int) -> Request:
        """Return the request with relative shares of the workers, by rank, if it trains.

        `min_splits` is the minimum number of micro-batches per batch, or 0. See `RetrySplitError`.
        """
        return self


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
    has_process_group: bool = False
    """Whether a process group exists. With ``num_workers=1`` there is none."""
    num_cpus: float = 1
    shares: tuple[float, ...] | None = None
    """Relative shares of the global batch set for nodes, by rank. None means equal shares."""
    is_alone: bool = False
    """Whether the process group has only this worker. True until a new worker joins the others."""
    is_in_driver: bool = False
    node_ip: str = "127.0.0.1"
    visible_gpus: tuple[str, ...] = ()
    """IDs of the GPUs of all workers on this node, in order. Every worker sees all of them."""
    gpu_index: int | None = None
    """Index of this worker's GPU among `visible_gpus`, or None without a GPU."""


class PausedError(Exception):
    """Raised by a runner that has paused at the requested step."""


class RetrySplitError(Exception):
    """Raised by a runner that ran out of memory in a step and has rolled the step back.

    The next attempt splits each batch into as many micro-batches as the argument, `min_splits`,
    says. All workers must do so at the same step, therefore it travels over the driver: in the
    worker's `Outcome`, and from its `Attempt` in the `TrainRequest` of the next one.
    """


class Runner(Protocol):
    """Runs a worker's content: an operator, a Keras operator, or a training function.

    `status`, `set_interrupted`, `pause_at`, `acquire_snapshot`, and `release_snapshot` run in
    *control* threads while the worker is busy, so they must not wait. The other methods run one at
    a time in the *work* thread.
    """

    def prepare(self, context: WorkerContext) -> None:
        """Adjust the process (threads, devices) before the process group exists."""

    def setup(self, context: WorkerContext) -> None:
        """Create the operator or the function. The process group of this generation exists."""

    def rejoin(self, context: WorkerContext, leader_rank: int) -> str | None:
        """Join a new generation and load the state of the leader. The process group exists.

        Return a warning about what this generation has changed, if there is one.
        """

    def status(self, acknowledged_step: int = -1) -> WorkerStatus:
        """Return the status of the worker, without the log points up to `acknowledged_step`."""

    def set_interrupted(self, interrupted: bool) -> None:
        """Make the current work raise at its next step. False withdraws the request."""

    def pause_at(self, step: int | None) -> int:
        """Make the current call raise PausedError after `step` committed steps. None cancels it.

        Return the current number of committed steps.
        """

    def acquire_snapshot(self, num_invalidations: int | None = None) -> dict[str, Any] | None:
        """Return the newest snapshot, for a restart after the loss of all workers.

        Return None if there is none, if it was sent, or if `SnapshotStatus.num_invalidations` is
        not `num_invalidations`.
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
