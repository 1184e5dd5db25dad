"""The worker process: it hosts one runner and one backend, and reports failures.

`actor_group.py` makes `Worker` a Ray actor. A worker in the driver's process needs no Ray.
"""

import contextlib
import gc
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from raysgd._internal.imports import frozen_imports
from raysgd._internal.runner import PausedError, Request, RetrySplitError, Runner, WorkerContext
from raysgd._internal.tracebacks import last_frame, stacks
from raysgd._internal.worker_status import WorkerStatus
from raysgd.cluster import process, serialization
from raysgd.cluster.host_monitor import DriverWatch
from raysgd.cluster.large_values import FileContent, IncomingValue, fits_ray_message, send
from raysgd.cluster.serialization import PackedValue, find_unpicklable, pack
from raysgd.comm.backend import CollectiveBackend
from raysgd.comm.connection import Address
from raysgd.errors import RemoteError, RemoteTraceback


@dataclass(frozen=True, kw_only=True)
class WorkerLocation:
    """Where a worker runs."""

    node_id: str
    node_ip: str
    pid: int = 0
    gpu_ids: tuple[str, ...] = ()
    is_in_driver: bool = False
    hostname: str = ""


OutcomeKind = Literal["ok", "paused", "user_error", "communication_error", "interrupted", "cut_off"]


@dataclass
class Outcome:
    """The result of one call: a value, or an exception and its kind.

    ``paused``: the call paused at the requested step. ``user_error``: user code raised.
    ``communication_error``: a collective failed, probably because another worker failed.
    ``interrupted``: the driver had interrupted the call. ``cut_off``: the worker interrupted the
    call because it lost the connection to the driver.
    """

    kind: OutcomeKind
    payload: Any
    """The value or the exception, packed if it comes from another process. Ray would unpickle the
    content in a thread where no user code may run."""
    status: WorkerStatus
    traceback: str = ""
    min_splits: int = 0  # micro-batches per batch in the repeated call, or 0 if more do not help

    def unpack(self) -> Any:
        """Return the value or the exception, as text if this process lacks its class."""
        try:
            return _unpack(self.payload)
        except Exception:
            if not self.traceback:
                raise
            after_frames = self.traceback.rpartition("\n  ")[2].partition("\n")[2]
            return RemoteError(after_frames.strip())

    def exception(self) -> BaseException:
        """Return the exception, with the worker's traceback as its cause."""
        error: BaseException = self.unpack()
        if self.traceback:
            head, _, text = self.traceback.partition(":\n")
            _, frame = last_frame(text)
            summary = str(_as_remote_error(error)).partition("\n")[0]
            shown = f"{head}. RAYSGD_TRACEBACK=full shows the traceback.\n{frame}\n{summary}"
            is_full = os.environ.get("RAYSGD_TRACEBACK") == "full" or not frame
            error.__cause__ = RemoteTraceback(self.traceback, "" if is_full else shown)
        return error


class CarriedError(Exception):
    """Carries an exception such as KeyboardInterrupt, which Ray would treat as a cancellation."""


WORK_METHODS = ("create_runner", "setup", "rejoin", "handle", "execute", "teardown")
"""Methods that run one at a time. The other methods run in parallel with them, as *control*."""


class Worker:
    """Hosts a runner. The driver calls it through a Ray actor, or directly in its own process.

    `WORK_METHODS` run one at a time, and the other methods in parallel with them.

    Args:
        catches_sigterm: whether to report SIGTERM to the driver instead of ending the process.
        hides_gpus: whether to hide the node's GPUs, because the worker reserves none.
        is_remote: whether the worker has its own process. If not, nothing is pickled.
    """

    def __init__(
        self, catches_sigterm: bool = False, hides_gpus: bool = False, is_remote: bool = True
    ) -> None:
        if hides_gpus:  # Ray hides GPUs only from processes that reserve some
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self.runner: Runner | None = None  # `teardown` can unset it while control threads run
        self._backend: CollectiveBackend | None = None
        self._is_remote = is_remote
        if is_remote:
            serialization.send_classes_of_the_script()
        self._interruption: OutcomeKind | None = None
        self._terminated_at: float | None = None
        if catches_sigterm:
            process.catch_sigterm(self._record_sigterm)
        self._context = WorkerContext()
        self._generation_lock = threading.RLock()
        """Held while the worker handles a message to this generation, so that the next one cannot
        start. A signal handler in the driver's process may take the lock again."""

    def locate(self) -> WorkerLocation:
        import ray

        context = ray.get_runtime_context()
        return WorkerLocation(
            node_id=context.get_node_id(),
            node_ip=ray.util.get_node_ip_address(),
            pid=os.getpid(),
            gpu_ids=tuple(str(gpu) for gpu in ray.get_gpu_ids()),
            hostname=os.uname().nodename,
        )

    def create_runner(self, hook: Any, runner: Any, backend: Any, sys_path: list[str]) -> Outcome:
        """Run the initialization hook, then unpickle runner and backend.

        Unpickling the runner imports modules that the hook may configure. Ray does not pass on all
        of `sys_path`, the ``sys.path`` of the driver.
        """

        def create_runner() -> None:
            if self._is_remote:
                process.is_worker = True
                process.end_forks_with_this_process()
            sys.path.extend(path for path in sys_path if path not in sys.path)
            function: Callable[[], None] | None = _unpack(hook)
            if function is not None:
                function()
            with frozen_imports() if self._is_remote else contextlib.nullcontext():
                self.runner = _unpack(runner, copies=not self._is_remote)
                self._backend = _unpack(backend)

        return self._outcome_of(create_runner)

    def setup(self, context: WorkerContext, rendezvous: Any) -> Outcome:
        """Prepare the process, join a process group, and call `Runner.setup`.

        A replacement worker sets up alone, in a group of one, while the others train.
        """

        def setup() -> None:
            self._join_group(context, rendezvous, prepare=True)
            self._live_runner.setup(context)
            if context.is_alone:
                self._live_runner.warm_up()

        return self._outcome_of(setup)

    def rejoin(self, context: WorkerContext, rendezvous: Any, leader_rank: int) -> Outcome:
        """Join the process group of the next generation, and load the leader's state."""

        def rejoin() -> str | None:
            self._join_group(context, rendezvous)
            return self._live_runner.rejoin(context, leader_rank)

        return self._outcome_of(rejoin)

    def _join_group(self, context: WorkerContext, rendezvous: Any, prepare: bool = False) -> None:
        with self._generation_lock:
            self._context = context
            self._interruption = None
            self._live_runner.set_interrupted(False)
            self._live_runner.pause_at(None)
        if prepare:
            self._live_runner.prepare(context)
        if self._backend is not None:
            group = replace(context, world_rank=0, world_size=1) if context.is_alone else context
            self._backend.teardown()
            self._backend.setup(group, rendezvous)

    def handle(
        self, request: Request | PackedValue | Address, inbox: Address | None = None
    ) -> Outcome:
        """Handle a request, or the large request at an address.

        Send a large answer to `inbox`, if it is given.
        """
        try:
            if not isinstance(request, Address):
                return self._success(self._live_runner.handle(_unpack(request)), inbox)
            with contextlib.closing(IncomingValue(request)) as large:
                return self._success(self._live_runner.handle(replace(large.value, incoming=large)))
        except BaseException as error:
            return self._failure(error)

    def interrupt(self, generation: int | None = None) -> None:
        """Make the current call fail, at its next step or in its collective.

        Ignore a late message to an older `generation`.
        """
        with self._generation_lock:
            if generation is not None and generation < self._context.generation:
                return
            self._interruption = self._interruption or "interrupted"
            if (runner := self.runner) is not None:
                runner.set_interrupted(True)
            if self._backend is not None:
                self._backend.interrupt()

    def watch_driver(self, address: Address, driver_grace_s: float, interrupts_calls: bool) -> str:
        """Watch the driver's host. Return the reason of a failure, or an empty string."""
        interrupt = self._interrupt_cut_off if interrupts_calls else lambda: None
        return DriverWatch(address, driver_grace_s, interrupt).start()

    def _interrupt_cut_off(self) -> None:
        self._interruption = "cut_off"
        self.interrupt()

    def status(self, acknowledged_step: int = -1) -> WorkerStatus:
        if (runner := self.runner) is None:
            return WorkerStatus()
        status, backend = runner.status(acknowledged_step), self._backend
        measured, process = status.measured, status.process
        if self._terminated_at is not None:
            process = process._replace(terminated_s=time.monotonic() - self._terminated_at)
        if backend is not None:
            process = process._replace(current_collective=backend.current_collective())
            if measured.timing is not None:
                measured = measured._replace(link_speeds=backend.link_speeds())
        return status._replace(measured=measured, process=process)

    def _record_sigterm(self) -> None:
        self._terminated_at = self._terminated_at or time.monotonic()

    def execute(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a user function. Ray sends its exception to the driver."""
        try:
            return function(*args, **kwargs)
        except (Exception, SystemExit):  # SystemExit would end the process
            raise
        except BaseException as error:
            raise CarriedError(_without_frames(error)) from error

    def pause_at(self, generation: int, step: int | None) -> int:
        """Make the call of a generation pause at a step. Return the current step."""
        with self._generation_lock:
            if generation < self._context.generation:
                return self._live_runner.status().position.global_step
            return self._live_runner.pause_at(step)

    def send_snapshot(
        self, step: int | None, num_invalidations: int, inbox: Address | None = None
    ) -> PackedValue | Address | None:
        """Return the newest snapshot, and release it. Send a large one to `inbox`.

        Return None if it was sent before, or is of another step or number of changes.
        """
        state = (
            None if (runner := self.runner) is None else runner.acquire_snapshot(num_invalidations)
        )
        if runner is None or state is None or (step is not None and state["global_step"] != step):
            return None
        began = time.monotonic()
        try:
            return _send_if_large(pack(state), inbox)
        finally:
            runner.release_snapshot(state, time.monotonic() - began)

    def stacks(self) -> str:
        return stacks()

    def teardown(self) -> None:
        if self.runner is not None:
            self.runner.teardown()
        self.runner = None
        if self._is_remote:
            process.end_wandb()
        else:  # a wrapper in a reference cycle keeps the threads of its process group
            gc.collect()  # first: a collection that ends them holds the GIL, and can hang
        if self._backend is not None:
            self._backend.teardown()

    @property
    def _live_runner(self) -> Runner:
        if (runner := self.runner) is None:
            raise RuntimeError(
                "This worker has no runner, because it was torn down or not created."
            )
        return runner

    def _outcome_of(self, function: Callable[[], Any]) -> Outcome:
        try:
            return self._success(function())
        except BaseException as error:
            return self._failure(error)

    def _success(self, value: Any, inbox: Address | None = None) -> Outcome:
        if inbox is not None and isinstance(value, FileContent):
            try:
                value = send(inbox, pickle.dumps(value.metadata), (), value.write)
            except Exception as error:  # the answer is why the content could not be written
                value = _pack_error(_without_frames(error))
        elif self._is_remote:
            value = _send_if_large(_pack_answer(value), inbox)
        return Outcome("ok", value, self._safe_status())

    def _failure(self, error: BaseException) -> Outcome:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if isinstance(error, KeyboardInterrupt) and in_main_thread and not self._is_remote:
            raise error  # Ctrl-C on the driver
        min_splits = 0
        if isinstance(error, RetrySplitError):
            assert error.__cause__ is not None
            min_splits, error = error.args[0], error.__cause__
        text = "".join(traceback.format_exception(error))
        if isinstance(error, SystemExit):
            # SystemExit would end the driver's program silently.
            error = RemoteError(
                f"SystemExit: user code called sys.exit({error.code!r}). Return, or raise an "
                "exception."
            )
        kind: OutcomeKind = "user_error"
        if isinstance(error, PausedError):
            return Outcome("paused", None, self._safe_status())
        advice = "" if self._backend is None else self._backend.advice_for(error)
        if self._interruption is not None:
            kind = self._interruption
        elif advice:
            error.add_note(advice)
        elif self._backend is not None and _has_cause(error, self._backend.is_communication_error):
            kind = "communication_error"
        status, rank = self._safe_status(), self._context.world_rank
        if min_splits and kind == "user_error":
            error = _without_frames(error)  # its frames hold memory that the repeated call needs
        if kind == "user_error":  # users often read only this line
            failure_place = status.process.failure_place
            where = f"Raised on worker {rank}", failure_place, last_frame(text)[0]
            notes = getattr(error, "__notes__", ())  # the error may have been raised before
            error.__notes__ = [each for each in notes if not each.startswith("Raised on worker ")]
            error.add_note(", ".join(filter(None, where)))
        if not self._is_remote:
            return Outcome(kind, error, status, min_splits=min_splits)
        text = f"Raised on worker {rank} (pid {os.getpid()}, {os.uname().nodename}):\n{text}"
        bare = _without_frames(error)
        # Send the error as text, because unpickling a TensorFlow error would import TensorFlow.
        packed = _pack_error(bare) if kind == "user_error" else pack(_as_remote_error(bare))
        return Outcome(kind, packed, status, text, min_splits)

    def _safe_status(self) -> WorkerStatus:
        with contextlib.suppress(Exception):  # the runner may be only partly set up
            return self.status()
        return WorkerStatus()


def _has_cause(error: BaseException | None, test: Callable[[BaseException], bool]) -> bool:
    chain: list[BaseException] = []
    while error is not None and all(error is not each for each in chain):  # it may be a cycle
        chain.append(error)
        error = error.__cause__ or error.__context__
    return any(map(test, chain))


def _unpack(value: Any, copies: bool = True) -> Any:
    return value.unpack(copies) if isinstance(value, PackedValue) else value


def _pack_answer(value: Any) -> PackedValue:
    try:
        return pack(value)
    except Exception as error:
        path, part = find_unpicklable(value)
        what = f"a {type(part).__name__}{path and f' at {path}'}"
        raise TypeError(f"A worker cannot send {what} to the driver: {error}") from error


def _send_if_large(packed: PackedValue, inbox: Address | None) -> PackedValue | Address:
    if inbox is None or fits_ray_message(packed):
        return packed
    return send(inbox, bytes(packed.data), packed.sizes, packed.write)


def _without_frames(error: BaseException) -> BaseException:
    """Remove the frames and causes of an exception, because they keep tensors and groups alive."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _pack_error(error: BaseException) -> PackedValue:
    """Pack an exception, or a RemoteError with its text if it cannot be pickled."""
    with contextlib.suppress(Exception):
        packed = pack(error)
        if isinstance(packed.unpack(), BaseException):
            return packed
    return pack(_as_remote_error(error))


def _as_remote_error(error: BaseException) -> RemoteError:
    text_error = RemoteError(f"{type(error).__qualname__}: {error}")
    text_error.__notes__ = [*getattr(error, "__notes__", ())]
    return text_error
