"""Hosts a training function in a worker: in a thread of its own, with a queue of one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from raysgd._internal.context import Preemption, Progress, Request, WorkerContext
from raysgd.elastic.requests import LoadRequest
from raysgd.train import session
from raysgd.train.arguments import env_flag
from raysgd.train.constants import ENABLE_SHARE_CUDA_VISIBLE_DEVICES_ENV
from raysgd.train.report_queue import ReportQueue, Turn
from raysgd.train.requests import BeginRequest, CheckpointRequest, EndRunRequest, NextRequest
from raysgd.train.session import Plan, Session
from raysgd.train.validation import Reported

__all__ = ["FunctionRunner"]


class FunctionRunner:
    """Hosts one training function. `Runner` says which method runs in which thread.

    The function starts with the call that begins the run, and anew in the first call after a
    restart. The driver takes what it reports by `next`, one turn at a time.

    Args:
        share_gpus: whether each worker sees the GPUs of all workers of its node, unless
            ``TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES`` says otherwise.
        encode: of the user's backend; None where it does nothing.
        full_size: workers of the full group, where steps keep the size that they have there.
    """

    def __init__(
        self,
        share_gpus: bool,
        encode: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        full_size: int | None = None,
    ) -> None:
        # on the driver: its environment decides
        self._share_gpus = env_flag(ENABLE_SHARE_CUDA_VISIBLE_DEVICES_ENV, share_gpus)
        self._encode = encode
        self._full_size = full_size
        self._context = WorkerContext()
        self._plan: Plan | None = None
        self._session: Session | None = None  # of the plan; None until the function has started

    # ---- life

    def prepare(self, context: WorkerContext) -> None:
        """Let this process see the GPUs of its node."""
        if self._share_gpus and context.visible_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(context.visible_gpus)

    def setup(self, context: WorkerContext) -> None:
        """Take the place in the group."""
        self._context = context
        session.take_place(context)

    def rejoin(self, context: WorkerContext, leader: int) -> None:
        """Take the place in a new generation; what ran in the one before has been stopped."""
        self.setup(context)
        self._plan = self._session = None

    def teardown(self) -> None:
        """Stop the function, and leave the place."""
        self.request_stop(True)
        session.take_place(None)

    # ---- read and set from another thread

    def progress(self) -> Progress:
        """Say how far the function is, and whether it waits for the driver."""
        running = self._session
        if running is None:
            return Progress()
        waits = running.report_queue.blocked_on_driver
        return Progress(global_step=running.iteration, blocked_on_driver=waits)

    def request_stop(self, requested: bool) -> None:
        """Let the function raise at its next report."""
        running = self._session
        if requested and running is not None:
            running.report_queue.stop()

    def pause_at(self, step: int | None) -> int:
        """Do nothing: a function cannot pause."""
        return 0

    def announce(self, preemption: Preemption | None) -> None:
        """Let the function know that workers are going to be taken away."""
        session.note_preemption(preemption)

    def snapshot(self) -> dict[str, Any] | None:
        """Return none: the driver has the checkpoints."""
        return None

    def warm_up(self) -> None:
        """Do nothing: no worker joins while a function runs."""

    # ---- calls of the driver

    def handle(self, request: Request) -> Any:
        """Do what a request of the driver asks for."""
        match request:
            case BeginRequest():
                return self.begin(request.plan)
            case NextRequest():
                return self.next(request.reported)
            case CheckpointRequest():
                return self.checkpoint(request.rank)
            case EndRunRequest():
                return self.end_run()
            case LoadRequest():
                return self.load_state_dict(request.state)
        raise NotImplementedError(f"{request.name} is no request to a training function.")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make ready to run what `state` says."""
        self._plan, self._session = state["plan"], None

    def begin(self, plan: Plan) -> None:
        """Start the function, unless that is done."""
        if self._plan is None or self._plan.run != plan.run:
            self._plan, self._session = plan, None
        self._started()

    def next(self, reported: Sequence[Reported] | None = None) -> Turn:
        """Wait for what the function hands over next. The turn before is dealt with.

        Args:
            reported: the checkpoints that there are now; None where they are those before.
        """
        running = self._started()
        if reported is not None:
            running.reported = reported
        return running.report_queue.take()

    def checkpoint(self, rank: int) -> bytes | None:
        """Return the checkpoint that the function has handed over, if this worker has that rank.

        None where there is none: the worker has started anew since then.
        """
        if self._session is None or self._context.world_rank != rank:
            return None
        return self._session.sent

    def end_run(self) -> None:
        """Stop the function, and wait until it has ended."""
        self.request_stop(True)
        if self._session is not None:
            self._session.join()

    def _started(self) -> Session:
        if self._session is None:
            if self._plan is None:
                raise RuntimeError("This worker was given no function to run.")
            shards = session.held_shards()
            self._session = Session(
                self._plan, self._context, ReportQueue(), shards, self._encode, self._full_size
            )
            self._session.start()
        return self._session
