"""Faults on purpose, to prove that a training run of yours survives them.

Nothing here is simulated: processes are killed and stopped by signals, on whatever node they run::

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

if TYPE_CHECKING:
    from raysgd.cluster.worker_handle import WorkerHandle
    from raysgd.trainer.base import OperatorTrainer

__all__ = ["Chaos", "Fault", "Injection", "hang", "kill", "resume", "schedule"]

_POLL_S = 0.02


def kill(trainer: OperatorTrainer, rank: int) -> int:
    """Kill the process of a worker (SIGKILL), and return its process id.

    Call it from another thread while ``train()`` runs, or between two calls.

    Args:
        trainer: a trainer with workers in processes of their own.
        rank: world rank of the worker, as it is now.

    Raises:
        TypeError: if `rank` is not an int.
        ValueError: if no worker has that rank, or it lives in the driver's process.
        ProcessLookupError: if its process has ended already.
    """
    return _signal(trainer, rank, signal.SIGKILL)


def hang(trainer: OperatorTrainer, rank: int) -> int:
    """Stop the process of a worker (SIGSTOP), and return its process id.

    It stays, with all that it holds, and does nothing; the others wait for it. Training goes on
    after `resume`, or without it where ``ElasticConfig(hang_timeout_s=...)`` says so.

    Args:
        trainer: a trainer with workers in processes of their own.
        rank: world rank of the worker, as it is now.

    Raises:
        TypeError: if `rank` is not an int.
        ValueError: if no worker has that rank, or it lives in the driver's process.
        ProcessLookupError: if its process has ended already.
    """
    return _signal(trainer, rank, signal.SIGSTOP)


def resume(trainer: OperatorTrainer, rank: int) -> int:
    """Let a worker that `hang` stopped go on (SIGCONT), and return its process id.

    Args:
        trainer: the trainer.
        rank: world rank of the worker, as it is now.

    Raises:
        TypeError: if `rank` is not an int.
        ValueError: if no worker has that rank, or it lives in the driver's process.
        ProcessLookupError: if its process has ended already.
    """
    return _signal(trainer, rank, signal.SIGCONT)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault to come: to whom, what, and when.

    Raises:
        ValueError: unless exactly one of `step` and `after_s` is given.
    """

    rank: int
    """World rank that the worker has at that moment."""
    step: int | None = None
    """It comes once so many steps of the trainer are done."""
    after_s: float | None = None
    """It comes so many seconds after the start of the injections."""
    kind: Literal["kill", "hang"] = "kill"

    def __post_init__(self) -> None:
        if (self.step is None) == (self.after_s is None):
            raise ValueError(f"{self}: give either step or after_s.")


@dataclass(frozen=True, kw_only=True)
class Injection:
    """One fault that has come."""

    fault: Fault
    pid: int
    """The process that was hit."""
    step: int
    """Steps that were done, as last heard from the workers."""
    time: float
    """When, in seconds since the epoch."""


def schedule(
    seed: int,
    num_kills: int,
    num_workers: int,
    *,
    num_steps: int | None = None,
    seconds: float | None = None,
    num_hangs: int = 0,
) -> list[Fault]:
    """Draw faults at random; the same arguments give the same faults.

    Args:
        seed: of the random numbers.
        num_kills: how many workers to kill.
        num_workers: ranks are drawn below it.
        num_steps: spread the faults over so many steps, at most one a step.
        seconds: spread them over so many seconds instead.
        num_hangs: how many workers to stop besides; needs ``hang_timeout_s``.

    Returns:
        The faults, in the order in which they come.

    Raises:
        ValueError: unless exactly one of `num_steps` and `seconds` is given, or if a count is out
            of its range.

    >>> [(fault.step, fault.rank) for fault in schedule(0, 3, 4, num_steps=100)]
    [(39, 0), (52, 2), (62, 3)]
    """
    if (num_steps is None) == (seconds is None):
        raise ValueError("schedule(): give either num_steps or seconds.")
    num_faults = num_kills + num_hangs
    if num_kills < 0 or num_hangs < 0 or num_workers < 1:
        raise ValueError(
            f"schedule(num_kills={num_kills}, num_hangs={num_hangs}, num_workers={num_workers}): "
            "the first two must be at least 0, and num_workers at least 1."
        )
    if num_steps is not None and num_faults >= num_steps:
        raise ValueError(
            f"schedule(): {num_faults} faults need more than {num_faults} steps, but "
            f"num_steps={num_steps}."
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
    """Injects faults while the caller trains, from a thread of its own.

    Use it as a context manager::

        with Chaos(trainer, schedule(1, num_kills=3, num_workers=4, num_steps=500)) as chaos:
            trainer.train()

    A fault whose moment has come waits until there is a worker of its rank that has not been hit
    before, and until `spare` others are left. Those that are still to come at the end of the
    block do not come at all. Workers that were stopped, and are there still, go on then.

    Args:
        trainer: the trainer whose workers are hit.
        faults: what to inject; `schedule` draws some.
        spare: how many workers to leave alone at any time. With 0 all may be lost at once, so
            that training restarts from a snapshot.

    Raises:
        ValueError: if the trainer can never have a worker of one of the ranks, or `spare` leaves
            none to hit.
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
        """The faults that have come, oldest first."""
        return list(self._injected)

    @property
    def pending(self) -> list[Fault]:
        """The faults that have not come yet."""
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
                member.signal(signal.SIGCONT)  # does nothing to one that was killed
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
                continue  # it has died by itself, and another will have the rank
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
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError(f"rank must be an int, but it is {rank!r}.")
    members = list(trainer._controller.members)
    if not 0 <= rank < len(members):
        there = f"ranks 0 to {len(members) - 1}" if members else "no workers"
        raise ValueError(f"There is no worker {rank}: the trainer has {there} now.")
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
            f"Worker {rank} lives in the driver's process (use_local=True), which would be hit "
            "itself. Take another rank, or leave use_local out."
        )
