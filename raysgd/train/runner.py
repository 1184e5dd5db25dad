"""Runs a training function in a thread of a worker process, and handles requests to it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

from raysgd._internal.context import Progress, Request, Runner, WorkerContext
from raysgd.cluster import process
from raysgd.elastic.call import LoadRequest
from raysgd.loop.requests import ApplyRequest
from raysgd.train import session
from raysgd.train.arguments import env_flag
from raysgd.train.constants import ENABLE_SHARE_CUDA_VISIBLE_DEVICES_ENV
from raysgd.train.integrations import Finder
from raysgd.train.report_queue import ReportQueue
from raysgd.train.worker_session import Plan, Session, process_state


@dataclass(frozen=True, kw_only=True)
class BeginRequest(Request):
    """Start the function, unless it is running."""

    plan: Plan


class NextRequest(Request):
    """Return the next turn of the function, because the driver has handled the previous one."""


class EndRunRequest(Request):
    """Stop the function, and wait until it has ended."""


class FunctionRunner(Runner):
    """Runs one training function. `Runner` documents which thread calls which method.

    A `BeginRequest` starts the function. After a restart, a `NextRequest` starts it too.

    `share_gpus` lets each worker see the GPUs of all workers on its node. In the driver's
    environment, ``TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES`` overrides it.
    """

    def __init__(self, share_gpus: bool) -> None:
        self._share_gpus = env_flag(ENABLE_SHARE_CUDA_VISIBLE_DEVICES_ENV, share_gpus)
        self._plan: Plan | None = None
        self._session: Session | None = None  # None until the function has started

    # ---- lifecycle

    def prepare(self, context: WorkerContext) -> None:
        if self._share_gpus and context.visible_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(context.visible_gpus)

    def setup(self, context: WorkerContext) -> None:
        process_state.context = context
        if process.is_worker:
            sys.modules["ray.air.session"] = session
            if Finder not in sys.meta_path:
                sys.meta_path.insert(0, Finder)

    def rejoin(self, context: WorkerContext, leader_rank: int) -> None:
        self.setup(context)
        self._plan = self._session = None

    def teardown(self) -> None:
        self.request_stop(True)
        process_state.context = None

    # ---- access from another thread

    def progress(self, acknowledged_step: int = -1) -> Progress:
        running = self._session
        if running is None:
            return Progress()
        waits = running.report_queue.blocked_on_driver
        return Progress(global_step=running.iteration, blocked_on_driver=waits)

    def request_stop(self, requested: bool) -> None:
        if requested and self._session is not None:
            self._session.report_queue.stop()

    def pause_at(self, step: int | None) -> int:
        return 0  # a function cannot pause, and the driver has its checkpoints

    # ---- requests of the driver

    def handle(self, request: Request) -> Any:
        match request:
            case BeginRequest(plan=plan):
                if self._plan is None or self._plan.run_id != plan.run_id:
                    self._plan, self._session = plan, None
                self._ensure_started()
            case NextRequest():
                return self._ensure_started().report_queue.get()
            case EndRunRequest():
                self.request_stop(True)
                if self._session is not None:
                    self._session.thread.join()
            case ApplyRequest(function=function):
                return function()
            case LoadRequest(state=state):
                self._plan, self._session = state["plan"], None
            case _:
                raise NotImplementedError(f"Training functions do not support {request.name}.")

    def _ensure_started(self) -> Session:
        if self._session is None:
            if self._plan is None:
                raise RuntimeError("This worker has no function to run.")
            self._session = Session(self._plan, ReportQueue())
            self._session.thread.start()
        return self._session
