"""Hosts a training function in a worker: in a thread of its own, with a queue of one."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raysgd.context import Progress, WorkerContext
from raysgd.train import session
from raysgd.train.report_queue import ReportQueue, Turn
from raysgd.train.session import Session

__all__ = ["FunctionRunner", "Plan"]


@dataclass(frozen=True)
class Plan:
    """What a run is made of; after a restart with another checkpoint."""

    run: str
    """A name that no other run has."""
    function: bytes
    """The training function, of no arguments, pickled."""
    checkpoint: bytes | None = None
    """The newest checkpoint, pickled."""
    iteration: int = 0
    """Reports that were made before it."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    experiment: Mapping[str, str] = field(default_factory=dict)


class FunctionRunner:
    """Hosts one training function; :class:`raysgd.context.Runner` says what runs in which thread.

    The function starts with the call that begins the run, and anew in the first call after a
    restart. The driver takes what it reports by `next`, one turn at a time.

    Args:
        share_gpus: whether each worker sees the GPUs of all workers of its node.
        encode: of the user's backend; None where it does nothing.
    """

    imports: Sequence[str] = ()

    def __init__(
        self, share_gpus: bool, encode: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    ) -> None:
        self._share_gpus = share_gpus
        self._encode = encode
        self._context = WorkerContext()
        self._plan: Plan | None = None
        self._session: Session | None = None
        self._report_queue: ReportQueue | None = None
        self._thread: threading.Thread | None = None

    # ---- life

    def prepare(self, context: WorkerContext) -> None:
        """Let this process see the GPUs of its node."""
        if self._share_gpus and context.visible_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(context.visible_gpus)

    def setup(self, context: WorkerContext) -> None:
        """Take the place in the group."""
        self._take(context)

    def rejoin(self, context: WorkerContext, leader: int) -> None:
        """Take the place in a new generation; what ran in the one before has been stopped."""
        self._take(context)
        self._plan = self._report_queue = self._thread = None

    def teardown(self) -> None:
        """Stop the function, and leave the place."""
        self.request_stop(True)
        session.take_place(None)

    # ---- read and set from another thread

    def progress(self) -> Progress:
        """Say how far the function is, and whether it waits for the driver."""
        report_queue, plan, running = self._report_queue, self._plan, self._session
        if report_queue is None or plan is None or running is None:
            return Progress()
        return Progress(
            global_step=running.iteration, blocked_on_driver=report_queue.blocked_on_driver
        )

    def request_stop(self, requested: bool) -> None:
        """Let the function raise at its next report."""
        if requested and self._report_queue is not None:
            self._report_queue.stop()

    def pause_at(self, step: int | None) -> int:
        """Do nothing: a function cannot pause."""
        return 0

    def snapshot(self) -> dict[str, Any] | None:
        """Return none: the driver has the checkpoints."""
        return None

    # ---- calls of the driver

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the driver has the checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make ready to run what `state` says."""
        self._plan = state["plan"]
        self._thread = None

    def begin(self, plan: Plan) -> None:
        """Start the function, unless that is done."""
        if self._plan is None or self._plan.run != plan.run:
            self._plan, self._thread = plan, None
        self._start()

    def next(self) -> Turn:
        """Wait for what the function hands over next. The turn before is dealt with."""
        self._start()
        assert self._report_queue is not None
        return self._report_queue.take()

    def checkpoint(self) -> bytes | None:
        """Return the checkpoint that the function has handed over, of a worker that is not 0.

        None where it has not: this worker has started anew since then.
        """
        return None if self._session is None else self._session.sent()

    def end_run(self) -> None:
        """Wait until the function, which was stopped, has ended."""
        self.request_stop(True)
        if self._thread is not None:
            self._thread.join()

    def _take(self, context: WorkerContext) -> None:
        self._context = context
        session.take_place(context)

    def _start(self) -> None:
        if self._thread is not None:
            return
        if self._plan is None:
            raise RuntimeError("This worker was given no function to run.")
        plan, report_queue = self._plan, ReportQueue()
        running = Session(
            self._context,
            report_queue,
            checkpoint=plan.checkpoint,
            iteration=plan.iteration,
            shards=session.held_shards(),
            encode=self._encode,
            metadata=plan.metadata,
            experiment=plan.experiment,
            run=f"{plan.run}/{plan.iteration}",
        )
        self._session, self._report_queue = running, report_queue
        self._thread = threading.Thread(
            target=_run,
            args=(plan.function, running, report_queue),
            name="raysgd-train-function",
            daemon=True,
        )
        self._thread.start()


def _run(packed: bytes, running: Session, report_queue: ReportQueue) -> None:
    """Run the function, in its thread."""
    session.enter(running)
    end, failure = None, None
    try:
        end = running.end(pickle.loads(packed)())
    except BaseException as error:
        failure = error
    session.leave(running)  # before the driver hears of the end, and begins another run
    report_queue.end(end, failure)
