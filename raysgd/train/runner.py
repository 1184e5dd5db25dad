"""Runs a training function in a thread of a worker process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from raysgd._internal.context import Preemption, Progress, Request, Runner, WorkerContext
from raysgd.elastic.requests import LoadRequest
from raysgd.train.arguments import env_flag
from raysgd.train.constants import ENABLE_SHARE_CUDA_VISIBLE_DEVICES_ENV
from raysgd.train.report_queue import ReportQueue
from raysgd.train.requests import BeginRequest, CheckpointRequest, EndRunRequest, NextRequest
from raysgd.train.session import Plan, Session, here

__all__ = ["FunctionRunner"]


class FunctionRunner(Runner):
    """Runs one training function. `Runner` documents which thread calls which method.

    The function starts with a `BeginRequest`, and after a restart with the next request.

    Args:
        share_gpus: whether each worker sees the GPUs of all workers on its node.
            ``TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES`` of the driver overrides it.
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
        self._share_gpus = env_flag(ENABLE_SHARE_CUDA_VISIBLE_DEVICES_ENV, share_gpus)
        self._encode = encode
        self._full_size = full_size
        self._context = WorkerContext()
        self._plan: Plan | None = None
        self._session: Session | None = None  # None until the function has started

    # ---- lifecycle

    def prepare(self, context: WorkerContext) -> None:
        if self._share_gpus and context.visible_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(context.visible_gpus)

    def setup(self, context: WorkerContext) -> None:
        self._context = here.place = context

    def rejoin(self, context: WorkerContext, leader: int) -> None:
        self.setup(context)
        self._plan = self._session = None

    def teardown(self) -> None:
        self.request_stop(True)
        here.place = None

    # ---- access from another thread

    def progress(self) -> Progress:
        session = self._session
        if session is None:
            return Progress()
        waits = session.report_queue.blocked_on_driver
        return Progress(global_step=session.iteration, blocked_on_driver=waits)

    def request_stop(self, requested: bool) -> None:
        session = self._session
        if requested and session is not None:
            session.report_queue.stop()

    def pause_at(self, step: int | None) -> int:
        return 0  # a function cannot pause

    def announce(self, preemption: Preemption | None) -> None:
        here.preemption = preemption

    def snapshot(self) -> dict[str, Any] | None:
        return None  # the driver holds the checkpoints

    def warm_up(self) -> None:
        pass  # no worker joins while a function runs

    # ---- requests of the driver

    def handle(self, request: Request) -> Any:
        match request:
            case BeginRequest(plan=plan):
                if self._plan is None or self._plan.run != plan.run:
                    self._plan, self._session = plan, None
                self._started()
            case NextRequest(reported=reported):
                session = self._started()
                if reported is not None:
                    session.reported = reported
                return session.report_queue.take()
            case CheckpointRequest(rank=rank):
                session_here = self._session if self._context.world_rank == rank else None
                return None if session_here is None else session_here.sent
            case EndRunRequest():
                self.request_stop(True)
                if self._session is not None:
                    self._session.join()
            case LoadRequest(state=state):
                self._plan, self._session = state["plan"], None
            case _:
                raise NotImplementedError(f"{request.name} is no request to a training function.")

    def _started(self) -> Session:
        if self._session is None:
            if self._plan is None:
                raise RuntimeError("This worker has no function to run.")
            self._session = Session(
                self._plan, self._context, ReportQueue(), here.shards, self._encode, self._full_size
            )
            self._session.start()
        return self._session
