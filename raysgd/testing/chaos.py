"""Fault injection, to prove that a training run survives failures.

Nothing is simulated: signals kill worker processes, on any node::

    from raysgd.testing.chaos import Chaos, draw_faults

    faults = draw_faults(seed=1, num_kills=3, num_workers=4, num_steps=500)
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
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from raysgd.cluster.worker_handle import WorkerHandle
    from raysgd.driver.operator_trainer import OperatorTrainer

__all__ = ["Chaos", "Fault", "InjectedFault", "draw_faults", "kill"]

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
    if not member.is_remote:
        raise ValueError(
            f"Worker {rank} is in the driver's process, because of use_local=True. Use another "
            "rank, or remove use_local=True."
        )
    if not member.signal(signal.SIGKILL):
        raise ProcessLookupError(
            f"The process of worker {rank} (pid {member.location.pid}) has ended already."
        )
    return member.location.pid


class Fault(NamedTuple):
    """A worker to kill: its world rank, and the number of finished steps after which to do so."""

    rank: int
    step: int


class InjectedFault(NamedTuple):
    """An injected fault: the process ID of the killed worker, and the Unix time in seconds."""

    fault: Fault
    pid: int
    time: float


def draw_faults(seed: int, num_kills: int, num_workers: int, num_steps: int) -> list[Fault]:
    """Draw random faults, at most one per step, and return them in the order of their steps.

    The same arguments give the same faults. The ranks are below `num_workers`, and the steps below
    `num_steps`.

    >>> [(fault.step, fault.rank) for fault in draw_faults(0, 3, 4, num_steps=100)]
    [(50, 0), (54, 2), (98, 3)]
    """
    draw = random.Random(seed)
    steps = sorted(draw.sample(range(1, num_steps), num_kills))
    return [Fault(rank=draw.randrange(num_workers), step=step) for step in steps]


class Chaos:
    """Kills workers from its own thread while the caller trains.

    Use it as a context manager::

        with Chaos(trainer, draw_faults(1, num_kills=3, num_workers=4, num_steps=500)) as chaos:
            trainer.train()

    A due fault waits for a worker with its rank, and for another worker to survive. Faults that
    remain at the end of the block are dropped.

    Args:
        trainer: The trainer whose workers to kill.
        faults: Faults to inject, for example from `draw_faults`.
    """

    def __init__(self, trainer: OperatorTrainer, faults: Sequence[Fault]) -> None:
        self.injected: list[InjectedFault] = []
        """The injected faults, oldest first."""
        self.pending: list[Fault] = list(faults)
        """The faults that remain."""
        self._trainer = trainer
        self._killed: set[WorkerHandle] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raysgd-chaos", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while self.pending and not self._stop.wait(_POLL_S):
            controller = self._trainer._controller
            step = controller.ask_step()
            for fault in list(self.pending):
                if fault.step <= step:
                    self._inject(fault, list(controller.members))

    def _inject(self, fault: Fault, members: list[WorkerHandle]) -> None:
        unharmed = [m for m in members if m not in self._killed and m.location.node_ip]
        if len(unharmed) < 2 or fault.rank >= len(members):
            return
        member, now = members[fault.rank], time.time()
        # If the worker has died or is in the driver, another worker may get the rank.
        if member in unharmed and member.is_remote and member.signal(signal.SIGKILL):
            self._killed.add(member)
            self.pending.remove(fault)
            self.injected.append(InjectedFault(fault, member.location.pid, now))
