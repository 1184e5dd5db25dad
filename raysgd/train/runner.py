"""Runs a training function in a thread of a worker process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from raysgd._internal.context import Preemption, Progress, Request, Runner, WorkerContext
from raysgd.elastic.requests import LoadRequest
from raysgd.train import session
from raysgd.train.arguments import env_flag
from raysgd.train.constants import ENABLE_SHARE_CUDA_VISIBLE_DEVICES_ENV
from raysgd.train.report_queue import ReportQueue, Turn
from raysgd.train.requests import BeginRequest, CheckpointRequest, EndRunRequest, NextRequest
from raysgd.train.session import Plan, Session
from raysgd.train.validation import Reported

__all__ = ["FunctionRunner"]


class FunctionRunner(Runner):
    """Runs one training function. `Runner` documents which thread calls which method.

    The function starts with a `BeginRequest`, and after a restart with the next request. The driver
    takes its results with `next`, one turn at a time.

    Args:
        share_gpus: whether each worker sees the GPUs of all workers on its node.
            ``TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES`` overrides it.
        encode: `encode_data` of the user's backend; None if it does nothing.
        full_size: number of workers of the full group, which sets the global batch size; None to
            scale it with the group.
    """

    def __init__(
        self,
        share_gpus: bool,
        encode: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        full_size: int | None = None,
    ) -> None:
        # evaluated on the driver, so the driver's environment decides
        self._share_gpus = env_flag(ENABLE_SHARE_CUDA_VISIBLE_DEVICES_ENV, share_gpus)
        self._encode = encode
        self._full_size = full_size
        self._context = WorkerContext()
        self._plan: Plan | None = None
        self._session: Session | None = None  # None until the function has started

    # ---- life

    def prepare(self, context: WorkerContext) -> None:
        """Make the GPUs of the node visible to this process."""
        if self._share_gpus and context.visible_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(context.visible_gpus)

    def setup(self, context: WorkerContext) -> None:
        self._context = context
        session.take_place(context)

    def rejoin(self, context: WorkerContext, leader: int) -> None:
        self.setup(context)
        self._plan = self._session = None

    def teardown(self) -> None:
        self.request_stop(True)
        session.take_place(None)

    # ---- read and set from another thread

    def progress(self) -> Progress:
        running = self._session
        if running is None:
            return Progress()
        waits = running.report_queue.blocked_on_driver
        return Progress(global_step=running.iteration, blocked_on_driver=waits)

    def request_stop(self, requested: bool) -> None:
        running = self._session
        if requested and running is not None:
            running.report_queue.stop()

    def pause_at(self, step: int | None) -> int:
        """Return 0: a function cannot pause."""
        return 0

    def announce(self, preemption: Preemption | None) -> None:
        session.note_preemption(preemption)

    def snapshot(self) -> dict[str, Any] | None:
        """Return None: the driver holds the checkpoints."""
        return None

    def warm_up(self) -> None:
        """Do nothing: no worker joins while a function runs."""

    # ---- calls of the driver

    def handle(self, request: Request) -> Any:
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
        """Prepare to run the plan in `state`."""
        self._plan, self._session = state["plan"], None

    def begin(self, plan: Plan) -> None:
        """Start the function, unless this plan is running already."""
        if self._plan is None or self._plan.run != plan.run:
            self._plan, self._session = plan, None
        self._started()

    def next(self, reported: Sequence[Reported] | None = None) -> Turn:
        """Return the next turn of the function. The driver has handled the previous one.

        Args:
            reported: the checkpoints on disk; None if they have not changed.
        """
        running = self._started()
        if reported is not None:
            running.reported = reported
        return running.report_queue.take()

    def checkpoint(self, rank: int) -> bytes | None:
        """Return the function's last checkpoint if this worker has that rank.

        Return None on other workers, and if the worker has restarted since.
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
