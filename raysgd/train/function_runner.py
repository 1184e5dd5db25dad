"""Runs a training function in a thread of a worker process, and handles requests to it."""

import os
import sys
from typing import Any

from raysgd._internal.runner import Request, Runner, WorkerContext
from raysgd._internal.worker_status import ProcessStatus, ReportedPosition, WorkerStatus
from raysgd.cluster import process
from raysgd.elastic.call import LoadRequest
from raysgd.loop.requests import ApplyRequest
from raysgd.train import session
from raysgd.train.arguments import env_flag
from raysgd.train.constants import ENABLE_SHARE_CUDA_VISIBLE_DEVICES_ENV, WORKER_CONTEXT_ENV
from raysgd.train.integrations import IntegrationFinder
from raysgd.train.result_queue import ResultQueue
from raysgd.train.worker_session import RunSpec, Session, process_state


class NextResultRequest(Request):
    """Return the next result of the function, because the driver has handled the previous one.

    The first request starts the function.
    """


class EndRunRequest(Request):
    """Stop the function, and wait until it has ended."""


class FunctionRunner(Runner):
    """Runs one training function. `Runner` documents which thread calls which method.

    `_Run.begin`, and `GroupBuilder` after a restart, send the fields of its `RunSpec` as a state.

    `share_gpus` lets each worker see the GPUs of all workers on its node. In the driver's
    environment, ``TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES`` overrides it.
    """

    def __init__(self, share_gpus: bool) -> None:
        self._share_gpus = env_flag(ENABLE_SHARE_CUDA_VISIBLE_DEVICES_ENV, share_gpus)
        self._spec: RunSpec | None = None
        self._session: Session | None = None  # None until the function has started

    # ---- lifecycle

    def prepare(self, context: WorkerContext) -> None:
        if self._share_gpus and context.visible_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(context.visible_gpus)

    def setup(self, context: WorkerContext) -> None:
        process_state.context = context
        os.environ[WORKER_CONTEXT_ENV] = repr(vars(context))
        if process.is_worker:
            sys.modules["ray.air.session"] = session
            if IntegrationFinder not in sys.meta_path:
                sys.meta_path.insert(0, IntegrationFinder)

    def rejoin(self, context: WorkerContext, leader_rank: int) -> None:
        self.setup(context)
        self._spec = self._session = None

    def teardown(self) -> None:
        self.set_interrupted(True)
        process_state.context = None

    # ---- access from another thread

    def status(self, acknowledged_step: int = -1) -> WorkerStatus:
        if (running := self._session) is None:
            return WorkerStatus()
        position = ReportedPosition(global_step=running.iteration)
        process = ProcessStatus(running.result_queue.is_blocked_on_driver)
        return WorkerStatus(position, process=process)

    def set_interrupted(self, interrupted: bool) -> None:
        if interrupted and self._session is not None:
            self._session.result_queue.stop()

    def pause_at(self, step: int | None) -> int:
        return 0  # a function cannot pause, and the driver has its checkpoints

    # ---- requests of the driver

    def handle(self, request: Request) -> Any:
        match request:
            case NextResultRequest():
                if self._session is None:
                    if self._spec is None:
                        raise RuntimeError("This worker has no function to run.")
                    self._session = Session(self._spec, ResultQueue())
                    self._session.thread.start()
                return self._session.result_queue.get()
            case EndRunRequest():
                self.set_interrupted(True)
                if self._session is not None:
                    self._session.thread.join()
            case ApplyRequest(function=function):
                return function()
            case LoadRequest(state=state):
                self._spec, self._session = RunSpec(**state), None
            case _:
                raise NotImplementedError(f"Training functions do not support {request.name}.")
