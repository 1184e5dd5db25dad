"""Fault injection, to prove that a training run survives failures.

Nothing is simulated: signals kill worker processes, on any node::

    from raysgd.testing.chaos import Chaos, schedule

    faults = schedule(seed=1, num_kills=3, num_workers=4, num_steps=500)
    with Chaos(trainer, faults) as chaos:
        trainer.train(max_retries=len(faults))
    print(chaos.injected, trainer.events)
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from raysgd._internal.arguments import check_int

if TYPE_CHECKING:
    from raysgd.cluster.worker_handle import WorkerHandle
    from raysgd.trainer.base import OperatorTrainer

__all__ = ["Chaos", "Fault", "Injection", "kill", "schedule"]

_POLL_S = 0.02


def kill(trainer: OperatorTrainer, rank: int) -> int:
    """Kill the process of a worker (SIGKILL), and return its process ID.

    Call it from another thread while ``train()`` runs, or between two calls. `rank` is the current
    world rank of the worker.

    Raises:
        ValueError: If no worker has that rank, or the worker runs in the driver's process.
        ProcessLookupError: If the process of the worker has already ended.
    """
    members = trainer._controller.members
    if rank not in range(len(members)):
        raise ValueError(f"No worker has rank {rank!r}. Number of workers: {len(members)}.")
    member = members[rank]
    if not _kill(member, rank):
        raise ProcessLookupError(
            f"The process of worker {rank} (pid {member.info.pid}) has ended already."
        )
    return member.info.pid


def _kill(member: WorkerHandle, rank: int) -> bool:
    """Kill a worker, and return whether the process existed."""
    if not member.remote:
        raise ValueError(
            f"Worker {rank} is in the driver's process, because of use_local=True. Use another "
            "rank, or remove use_local=True."
        )
    return member.signal(signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One planned fault. Exactly one of `step` and `after_s` must be given."""

    rank: int
    """World rank of the worker at the time of the fault."""
    step: int | None = None
    """Number of steps after which the fault happens."""
    after_s: float | None = None
    """Seconds from the start of the injections to the fault."""

    def __post_init__(self) -> None:
        if (self.step is None) == (self.after_s is None):
            raise ValueError(f"{self}: give either step or after_s.")


@dataclass(frozen=True, kw_only=True)
class Injection:
    """One injected fault."""

    fault: Fault
    pid: int
    """ID of the affected process."""
    step: int
    """Number of finished steps, as last reported by the workers."""
    time: float
    """Time in seconds since the Unix epoch."""


def schedule(
    seed: int,
    num_kills: int,
    num_workers: int,
    *,
    num_steps: int | None = None,
    seconds: float | None = None,
) -> list[Fault]:
    """Draw random faults, and return them in the order of their times.

    The same arguments give the same faults.

    Args:
        seed: Seed of the random numbers.
        num_kills: Number of workers to kill.
        num_workers: Exclusive upper bound of the ranks.
        num_steps: Spread the faults over this many steps, at most one per step.
        seconds: Spread the faults over this many seconds instead.

    Raises:
        ValueError: Unless exactly one of `num_steps` and `seconds` is given, or if a count is out
            of range.

    >>> [(fault.step, fault.rank) for fault in schedule(0, 3, 4, num_steps=100)]
    [(39, 0), (52, 2), (62, 3)]
    """
    check_int("schedule", "num_kills", num_kills, 0)
    check_int("schedule", "num_workers", num_workers, 1)
    draw = random.Random(seed)
    ranks = [draw.randrange(num_workers) for _ in range(num_kills)]
    if seconds is not None and num_steps is None:
        times = sorted(draw.uniform(0.0, seconds) for _ in ranks)
        return [Fault(rank=r, after_s=after_s) for r, after_s in zip(ranks, times, strict=True)]
    if num_steps is None or seconds is not None:
        raise ValueError("schedule(): give either num_steps or seconds.")
    if num_kills >= num_steps:
        raise ValueError(f"schedule(num_steps={num_steps}): must be above num_kills={num_kills}.")
    steps = sorted(draw.sample(range(1, num_steps), num_kills))
    return [Fault(rank=rank, step=step) for rank, step in zip(ranks, steps, strict=True)]


class Chaos:
    """Injects faults from its own thread while the caller trains.

    Use it as a context manager::

        with Chaos(trainer, schedule(1, num_kills=3, num_workers=4, num_steps=500)) as chaos:
            trainer.train()

    A due fault waits for a worker with its rank that was not hit before, and for `spare` further
    workers. At the end of the block, remaining faults are dropped.

    Args:
        trainer: The trainer whose workers to hit.
        faults: Faults to inject, for example from `schedule`.
        spare: Number of workers to leave unharmed at any time. With 0, all workers can be lost
            together, so that training restarts from a snapshot.

    Raises:
        ValueError: If the trainer can never have a worker with one of the ranks, or `spare` leaves
            no worker to hit.
    """

    def __init__(self, trainer: OperatorTrainer, faults: Sequence[Fault], spare: int = 1) -> None:
        for fault in faults:
            if not 0 <= fault.rank < trainer.max_workers:
                raise ValueError(f"{fault}: the trainer has at most {trainer.max_workers} workers.")
        check_int("Chaos", "spare", spare, 0, trainer.max_workers - 1)
        self.injected: list[Injection] = []
        """The injected faults, oldest first."""
        self.pending: list[Fault] = list(faults)
        """The faults that remain."""
        self._trainer = trainer
        self._spare = spare
        self._hit: set[WorkerHandle] = set()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="raysgd-chaos", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def _run(self) -> None:
        started = time.monotonic()
        try:
            while self.pending and not self._stop.wait(_POLL_S):
                self._inject_due(time.monotonic() - started)
        except BaseException as error:
            self._error = error

    def _inject_due(self, elapsed_s: float) -> None:
        controller = self._trainer._controller
        step = max((p.global_step for p in controller.ask_progress().values()), default=-1)
        for fault in list(self.pending):
            now, planned = (elapsed_s, fault.after_s) if fault.step is None else (step, fault.step)
            if planned is None or now < planned:
                continue
            members = list(controller.members)
            unharmed = [m for m in members if m not in self._hit and m.info.node_ip]
            if len(unharmed) <= self._spare or fault.rank >= len(members):
                continue
            member = members[fault.rank]
            at = time.time()
            # If the worker has died, a replacement will get the rank.
            if member in unharmed and _kill(member, fault.rank):
                self._hit.add(member)
                self.pending.remove(fault)
                self.injected.append(
                    Injection(fault=fault, pid=member.info.pid, step=max(0, step), time=at)
                )
