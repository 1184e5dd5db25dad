"""What a worker knows about its place in the group, and what it hosts.

:class:`Runner` is the seam between the execution layer, which knows no framework, and the
families, which know no actors: a worker hosts one runner, which handles typed requests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = [
    "OutOfMemoryError",
    "PausedError",
    "Preemption",
    "Progress",
    "Request",
    "Runner",
    "WorkerContext",
]


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """The place of one worker in one generation of the group.

    A generation is one membership, from one rendezvous to the next.
    """

    world_rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Rank among the workers of the same node."""
    local_world_size: int = 1
    """Number of workers on the same node."""
    node_rank: int = 0
    generation: int = 0
    distributed: bool = False
    """Whether there is a process group; with ``num_workers=1`` there is none."""
    num_cpus: float = 1
    alone: bool = False
    """Whether the process group has this worker alone, which joins the others after its setup."""
    in_driver: bool = False
    """Whether this worker lives in the driver's process (``use_local``)."""
    node_ip: str = "127.0.0.1"
    visible_gpus: tuple[str, ...] = ()
    """Ids of the GPUs of all workers of this node, in order; each worker sees them all."""
    gpu_index: int | None = None
    """Which of the visible GPUs is this worker's own; None without a GPU."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a worker has come. Read from another thread while the worker is busy."""

    epoch: int = 0
    """Epochs that are completed."""
    in_epoch: bool = False
    """Whether a further epoch is part-finished."""
    global_step: int = 0
    """Committed steps: those whose optimizer update is done."""
    num_batches: int = 0
    """Batches finished in the segment under way."""
    total_batches: int | None = None
    """Batches that the segment under way will take; None where that is unknown."""
    num_samples: int = 0
    """Samples finished in the segment under way."""
    num_covered: int | None = None
    """Samples that all workers together, lost ones included, have trained on in the newest call;
    None where the loader is not shared out by us."""
    step_s: float = 0.0
    """Mean seconds of a step in the segment under way; 0 where that is unknown."""
    snapshot: int | None = None
    """Committed steps of the newest snapshot that this worker holds for the driver."""
    split: int = 1
    """In how many parts batches are trained, since they did not fit into memory."""
    compiling: bool = False
    """Whether a model is being compiled, most likely: it was called in a way that is new."""
    latest: Mapping[str, float] = field(default_factory=dict)
    """Newest values of the first few metrics, as last read; empty before the first batch."""
    divided: bool = False
    """Whether each worker has a share of the state, so that a snapshot is that of all of them."""
    is_fully_sharded: bool = False
    """Whether that is so of the models as well."""
    lacks_shards: bool = False
    """Whether shares of the state were lost with all workers that had them."""
    partial: bool = False
    """Whether an optimizer raised within a step, so that the state is that of no step."""
    blocked_on_driver: bool = False
    """Whether the worker's code does nothing but wait for the driver, or has ended."""
    terminated: bool = False
    """Whether the worker's process was sent SIGTERM."""
    collective: int | None = None
    """Number of the collective in which it waits for all the others; None where it is in none, or
    where the backend cannot tell."""


@dataclass(frozen=True, kw_only=True)
class Preemption:
    """The announcement that workers of the group are going to be taken away."""

    deadline: float | None
    """When the first of them is, in seconds since the epoch; None where no time was named."""
    ranks_by_node: Mapping[str, Sequence[int]]
    """Which of them, by Ray's ids of their nodes."""


class Request:
    """What the driver asks of a runner. Subclasses are frozen dataclasses with the arguments."""

    @property
    def name(self) -> str:
        """Name for messages: ``update_schedulers`` for `UpdateSchedulersRequest`."""
        words = type(self).__name__.removesuffix("Request")
        return re.sub(r"(?<!^)(?=[A-Z])", "_", words).lower()

    def with_split(self, split: int) -> Request:
        """Return the same request with at least `split` micro-batches per batch."""
        raise NotImplementedError(f"{self.name} does not train.")


class PausedError(Exception):
    """Raised by a runner's method that has stopped at the step at which it was asked to."""


class OutOfMemoryError(Exception):
    """Raised by a runner's method that ran out of memory in a step, which it has taken back.

    Its cause is the error. The method may be called again with `split`, in how many parts to train
    each batch.
    """

    def __init__(self, split: int) -> None:
        super().__init__()
        self.split = split


class Runner(Protocol):
    """What a worker hosts: an operator, a Keras operator or a training function.

    ``setup``, ``rejoin``, ``teardown`` and ``handle`` run one at a time in the worker's *work*
    thread. ``progress``, ``request_stop``, ``pause_at``,
    ``announce`` and ``snapshot`` run in parallel in a *control* thread, so they only read and set
    attributes.
    """

    def prepare(self, context: WorkerContext) -> None:
        """Adjust the process (threads, devices) before the process group exists."""

    def setup(self, context: WorkerContext) -> None:
        """Build what the runner hosts. The process group of this generation exists."""

    def rejoin(self, context: WorkerContext, leader: int) -> None:
        """Enter a new generation, whose process group exists, with the state of rank `leader`."""

    def progress(self) -> Progress:
        """Say how far the work is."""

    def request_stop(self, requested: bool) -> None:
        """Ask the work under way to raise at its next step; False takes the request back."""

    def pause_at(self, step: int | None) -> int:
        """Let the call under way raise PausedError once `step` steps are committed.

        None takes the request back. Returns how many are committed when the request is heard.
        """

    def announce(self, preemption: Preemption | None) -> None:
        """Take note of which workers are going to be taken away; None: of none any more."""

    def snapshot(self) -> dict[str, Any] | None:
        """Return the newest snapshot, for a restart when all workers are lost."""

    def warm_up(self) -> None:
        """Prepare a replacement worker, after ``setup``, for its first step in the group."""

    def handle(self, request: Request) -> Any:
        """Do what a request asks for, and return the answer."""

    def teardown(self) -> None:
        """Let go of what was built. The process may live on (``use_local``)."""
