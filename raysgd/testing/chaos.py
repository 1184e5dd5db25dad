"""Fault injection, to prove that a training run survives failures.

Nothing is simulated: signals kill or stop worker processes, on any node::

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
from typing import TYPE_CHECKING, Literal, Self

from raysgd._internal.arguments import check_int

if TYPE_CHECKING:
    from raysgd.cluster.worker_handle import WorkerHandle
    from raysgd.trainer.base import OperatorTrainer

__all__ = ["Chaos", "Fault", "Injection", "hang", "kill", "resume", "schedule"]

_POLL_S = 0.02


def kill(trainer: OperatorTrainer, rank: int) -> int:
    """Kill the process of a worker (SIGKILL), and return its process ID.

    Call it from another thread while ``train()`` runs, or between two calls.

    Args:
        trainer: A trainer whose workers have their own processes.
        rank: Current world rank of the worker.

    Raises:
        ValueError: If no worker has that rank, or it runs in the driver's process.
        ProcessLookupError: If its process has already ended.
    """
    return _signal(trainer, rank, signal.SIGKILL)


def hang(trainer: OperatorTrainer, rank: int) -> int:
    """Stop the process of a worker (SIGSTOP), and return its process ID.

    The process keeps its resources, and the other workers wait for it. Training continues after
    `resume`, or without the worker after ``ElasticConfig(hang_timeout_s=...)``. Arguments and
    errors are those of `kill`.
    """
    return _signal(trainer, rank, signal.SIGSTOP)


def resume(trainer: OperatorTrainer, rank: int) -> int:
    """Continue a worker that `hang` stopped (SIGCONT), and return its process ID.

    Arguments and errors are those of `kill`.
    """
    return _signal(trainer, rank, signal.SIGCONT)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One planned fault.

    Raises:
        ValueError: Unless exactly one of `step` and `after_s` is given.
    """

    rank: int
    """World rank of the worker at the time of the fault."""
    step: int | None = None
    """Number of steps after which it happens."""
    after_s: float | None = None
    """Seconds after the start of the injections when it happens."""
    kind: Literal["kill", "hang"] = "kill"

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
    num_hangs: int = 0,
) -> list[Fault]:
    """Draw random faults. The same arguments give the same faults.

    Args:
        seed: Seed of the random numbers.
        num_kills: Number of workers to kill.
        num_workers: Exclusive upper bound of the ranks.
        num_steps: Spread the faults over this many steps, at most one per step.
        seconds: Spread the faults over this many seconds instead.
        num_hangs: Number of additional workers to stop. Requires ``hang_timeout_s``.

    Returns:
        The faults in the order of their times.

    Raises:
        ValueError: Unless exactly one of `num_steps` and `seconds` is given, or if a count is out
            of range.

    >>> [(fault.step, fault.rank) for fault in schedule(0, 3, 4, num_steps=100)]
    [(39, 0), (52, 2), (62, 3)]
    """
    if (num_steps is None) == (seconds is None):
        raise ValueError("schedule(): give either num_steps or seconds.")
    check_int("schedule", "num_kills", num_kills, 0)
    check_int("schedule", "num_hangs", num_hangs, 0)
    check_int("schedule", "num_workers", num_workers, 1)
    num_faults = num_kills + num_hangs
    if num_steps is not None and num_faults >= num_steps:
        raise ValueError(
            f"schedule(num_steps={num_steps}): must be above {num_faults}, the faults."
        )
    draw = random.Random(seed)
    kinds: list[Literal["kill", "hang"]] = []
    kinds += ["kill"] * num_kills
    kinds += ["hang"] * num_hangs
    draw.shuffle(kinds)
    ranks = [draw.randrange(num_workers) for _ in kinds]
    if num_steps is not None:
        steps = sorted(draw.sample(range(1, num_steps), num_faults))
        return [
            Fault(rank=rank, step=step, kind=kind)
            for rank, step, kind in zip(ranks, steps, kinds, strict=True)
        ]
    assert seconds is not None
    times = sorted(draw.uniform(0.0, seconds) for _ in kinds)
    return [
        Fault(rank=rank, after_s=after_s, kind=kind)
        for rank, after_s, kind in zip(ranks, times, kinds, strict=True)
    ]


class Chaos:
    """Injects faults from its own thread while the caller trains.

    Use it as a context manager::

        with Chaos(trainer, schedule(1, num_kills=3, num_workers=4, num_steps=500)) as chaos:
            trainer.train()

    When a fault is due, it waits for a worker of its rank that was not hit before, and for `spare`
    further workers. At the end of the block, remaining faults are dropped, and stopped workers
    continue.

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
        if not 0 <= spare < trainer.max_workers:
            raise ValueError(f"Chaos(spare={spare}): must be 0 to {trainer.max_workers - 1}.")
        self._trainer = trainer
        self._spare = spare
        self._pending = list(faults)
        self._injected: list[Injection] = []
        self._hit: set[WorkerHandle] = set()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="raysgd-chaos", daemon=True)

    @property
    def injected(self) -> list[Injection]:
        """The injected faults, oldest first."""
        return list(self._injected)

    @property
    def pending(self) -> list[Fault]:
        """The faults that remain."""
        return list(self._pending)

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
        for member in self._trainer._controller.members:
            if member in self._hit and member.remote:
                member.signal(signal.SIGCONT)  # has no effect on a killed process
        if self._error is not None and error is None:
            raise self._error

    def _run(self) -> None:
        started = time.monotonic()
        try:
            while self._pending and not self._stop.wait(_POLL_S):
                self._inject_due(time.monotonic() - started)
        except BaseException as error:
            self._error = error

    def _inject_due(self, elapsed_s: float) -> None:
        controller = self._trainer._controller
        step = max((p.global_step for p in controller.ask_progress().values()), default=-1)
        for fault in self.pending:
            if not _is_due(fault, step, elapsed_s):
                continue
            members = list(controller.members)
            unharmed = [m for m in members if m not in self._hit and m.info.node_ip]
            if len(unharmed) <= self._spare or fault.rank >= len(members):
                continue
            member = members[fault.rank]
            if member not in unharmed:
                continue
            number = signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP
            now = time.time()
            _check_signalled(member, fault.rank)
            if not member.signal(number):
                continue  # the worker has died, and a replacement will get the rank
            self._hit.add(member)
            self._pending.remove(fault)
            self._injected.append(
                Injection(fault=fault, pid=member.info.pid, step=max(0, step), time=now)
            )


def _is_due(fault: Fault, step: int, elapsed_s: float) -> bool:
    if fault.step is not None:
        return step >= fault.step
    return fault.after_s is not None and elapsed_s >= fault.after_s


def _signal(trainer: OperatorTrainer, rank: int, number: signal.Signals) -> int:
    members = list(trainer._controller.members)
    if rank not in range(len(members)):
        raise ValueError(f"There is no worker {rank!r}: the trainer has {len(members)} now.")
    member = members[rank]
    _check_signalled(member, rank)
    if not member.signal(number):
        raise ProcessLookupError(
            f"The process of worker {rank} (pid {member.info.pid}) has ended already."
        )
    return member.info.pid


def _check_signalled(member: WorkerHandle, rank: int) -> None:
    if not member.remote:
        raise ValueError(
            f"Worker {rank} is in the driver's process (use_local=True). Use another rank, or no "
            "use_local."
        )
