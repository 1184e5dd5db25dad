"""Handles of workers: Ray actors, or a worker in the driver's own process."""

import contextlib
import os
import re
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

import psutil

from raysgd._internal.paths import without_secrets
from raysgd.cluster.host_monitor import HostError, HostMonitor, HostWatch
from raysgd.cluster.serialization import PackedValue
from raysgd.cluster.worker import Worker, WorkerLocation

P = ParamSpec("P")
R = TypeVar("R")
Method = Callable[Concatenate[Worker, P], R]
"""A method of `Worker`."""

ROOT_CAUSE_S = 0.5
"""Seconds to wait for the loss that caused an error. The peers of a dead worker see a broken
connection before Ray reports its death."""
_WHICH = ("class_name:", "actor_id:", "pid:", "name:", "namespace:", "ip:")
"""Prefixes of the lines that identify the lost actor in a Ray error."""
_SIGNAL_S = 10.0  # timeout for sending a signal on another node, in seconds


class WorkerHandle(ABC):
    """One worker, on the driver. Calls return futures."""

    location = WorkerLocation(node_id="", node_ip="")  # empty until it is known
    is_remote: bool  # else it runs in the process of the driver
    watch: HostWatch | None = None  # None on the driver's own host
    can_be_called: bool = True

    def start_watching(self, location: WorkerLocation) -> None:
        """Store where the worker runs, and start to watch its host."""
        self.location = location

    @property
    def is_reachable(self) -> bool:
        return bool(self.location.node_ip) if self.watch is None else self.watch.is_reachable

    def may_be_alive(self, error: BaseException) -> bool:
        """Return whether the worker may be alive although Ray raised this error."""
        return False

    @abstractmethod
    def submit_work(self, method: Method[P, R], *arguments: P.args, **named: P.kwargs) -> Future[R]:
        """Call a method of the worker in its work thread, one call at a time."""

    @abstractmethod
    def submit_control(
        self, method: Method[P, R], *arguments: P.args, **named: P.kwargs
    ) -> Future[R]:
        """Call a method outside of `WORK_METHODS`, in parallel with the work."""

    def execute(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a user function in the work thread, and return a Ray reference."""
        raise RuntimeError(f"{self.node_name}: this worker is not a Ray actor.")

    @abstractmethod
    def kill(self) -> None: ...

    def exit_process(self, timeout_s: float) -> Future[bool]:
        """Ask the process to exit. The result is True if it exits within `timeout_s`."""
        raise NotImplementedError  # only a worker in another process exits

    def kill_process(self) -> None:
        """Kill the worker even if its process is stopped."""
        self.kill()

    def signal(self, number: int) -> bool:
        """Send a signal to the worker's process. Return False if the process is gone."""
        raise RuntimeError(f"{self.node_name}: this worker has no process of its own.")

    def ask_if_stopped(self) -> Future[bool]:
        """Ask the worker's node whether the process is stopped, for example by SIGSTOP."""
        raise NotImplementedError  # a worker in the driver's process always answers

    @property
    def node_name(self) -> str:
        if not self.location.node_ip:
            return "a node that is not known yet"
        return f"node {self.location.node_id[:8] or 'unknown'} ({self.location.node_ip})"


class ActorHandle(WorkerHandle):
    """A worker in a Ray actor. Without a monitor, only Ray watches its host."""

    is_remote = True

    def __init__(self, actor: Any, monitor: HostMonitor | None = None) -> None:
        self.actor = actor
        self._monitor = monitor
        self._unanswered: dict[Future[Any], None] = {}
        self._host_error: HostError | None = None

    def start_watching(self, location: WorkerLocation) -> None:
        self.location = location
        monitor = self._monitor
        if monitor is not None and (watch := monitor.watch(location.node_ip, self._fail_calls)):
            self.watch = watch
            arguments = (watch.address, monitor.driver_grace_s, monitor.interrupts_calls)
            future = self.submit_control(Worker.watch_driver, *arguments)
            future.add_done_callback(monitor.warn_if_unwatched)

    def _fail_calls(self, error: HostError) -> None:
        """Fail all current and later calls."""
        self._host_error = error
        with contextlib.suppress(KeyError):  # no call is left
            while True:
                self._unanswered.popitem()[0].set_exception(error)

    def submit_work(self, method: Method[P, R], *arguments: P.args, **named: P.kwargs) -> Future[R]:
        self._check_callable()
        sent = [each.store() if isinstance(each, PackedValue) else each for each in arguments]
        future: Future[R] = getattr(self.actor, method.__name__).remote(*sent, **named).future()
        return future if self.watch is None else self._fail_if_lost(future)

    submit_control = submit_work  # the actor's method defines the concurrency group

    def _fail_if_lost(self, future: Future[Any]) -> Future[Any]:
        """Return a future of the same answer, which fails if the host is lost.

        A lock could deadlock with a garbage collection.
        """
        waiting: Future[Any] = Future()
        self._unanswered[waiting] = None
        if self._host_error is not None:
            self._fail_calls(self._host_error)

        def pass_on(future: Future[Any]) -> None:
            if self._unanswered.pop(waiting, waiting) is waiting:
                return  # the host was lost before
            if (error := future.exception()) is not None:
                waiting.set_exception(error)
            else:
                waiting.set_result(future.result())

        future.add_done_callback(pass_on)
        return waiting

    def execute(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._check_callable()
        return self.actor.execute.remote(function, *args, **kwargs)

    def may_be_alive(self, error: BaseException) -> bool:
        import ray.exceptions

        # If a monitor watches the host, the error can be temporary. Functions cannot repeat calls.
        if self.watch is None or self._monitor is None or not self._monitor.interrupts_calls:
            return False
        return isinstance(error, ray.exceptions.ActorUnavailableError)

    def _check_callable(self) -> None:
        if not self.can_be_called:
            raise RuntimeError(
                "Ray was shut down after this trainer was created. Create a new trainer."
            )

    @property
    def can_be_called(self) -> bool:  # type: ignore[override]
        """Whether Ray is initialized. A call without it would start Ray again."""
        import ray

        return bool(ray.is_initialized())

    def kill(self) -> None:
        import ray

        if self.watch is not None:
            self.watch.close()
        if self.can_be_called:
            with contextlib.suppress(Exception):  # the worker may be gone already
                ray.kill(self.actor)

    def exit_process(self, timeout_s: float) -> Future[bool]:
        self._check_callable()
        self.actor.__ray_terminate__.remote()
        # Ray reports the end of an actor before its exit handlers run.
        return self._run_on_node(_await_exit, timeout_s)

    def kill_process(self) -> None:
        if self._host_error is None:
            with contextlib.suppress(Exception):  # its node may be gone already
                self.signal(signal.SIGKILL)
        self.kill()

    def signal(self, number: int) -> bool:
        try:
            # Ray cannot send os.kill itself, because it is not a Python function.
            self._run_on_node(lambda pid: os.kill(pid, number)).result(_SIGNAL_S)
        except ProcessLookupError:
            return False
        return True

    def ask_if_stopped(self) -> Future[bool]:
        return self._run_on_node(lambda pid: psutil.Process(pid).status() == psutil.STATUS_STOPPED)

    def _run_on_node(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call a function with the worker's process ID on the worker's node.

        A thread waits for the call, because no Ray task starts while the Ray head is silent.
        """
        ended: Future[Any] = Future()

        def call() -> None:
            try:
                run = function if _is_here(self.location) else _as_task(function, self.location)
                ended.set_result(run(self.location.pid, *arguments))
            except BaseException as error:
                ended.set_exception(error)

        threading.Thread(target=call, daemon=True).start()
        return ended


class LocalHandle(WorkerHandle):
    """A worker in the driver's process.

    The only worker of a group runs in the caller's thread, where debuggers can step into it. Worker
    0 of a larger group has its own thread.
    """

    is_remote = False

    def __init__(self, has_thread: bool = False) -> None:
        self.location = WorkerLocation(node_id="", node_ip="127.0.0.1", is_in_driver=True)
        self.worker = Worker(is_remote=False)
        self._thread = ThreadPoolExecutor(1, "raysgd-worker-0") if has_thread else None

    def submit_work(self, method: Method[P, R], *arguments: P.args, **named: P.kwargs) -> Future[R]:
        if self._thread is not None:
            with contextlib.suppress(RuntimeError):  # Python ends the thread before it exits
                return self._thread.submit(method, self.worker, *arguments, **named)
        future: Future[R] = Future()
        future.set_result(method(self.worker, *arguments, **named))
        return future

    def submit_control(
        self, method: Method[P, R], *arguments: P.args, **named: P.kwargs
    ) -> Future[R]:
        future: Future[R] = Future()
        try:
            future.set_result(method(self.worker, *arguments, **named))
        except Exception as error:
            future.set_exception(error)
        return future

    def kill(self) -> None:  # the process is the driver's
        if self._thread is not None:
            self._thread.shutdown(wait=False)  # a queued teardown still runs


def _as_task(function: Any, location: WorkerLocation) -> Callable[..., Any]:
    """Return a function that runs as a Ray task on the node of a worker."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    at = NodeAffinitySchedulingStrategy(location.node_id, soft=False)
    remote: Any = ray.remote
    task = remote(num_cpus=0, scheduling_strategy=at)(function)
    return lambda *arguments: ray.get(task.remote(*arguments))


def _await_exit(pid: int, timeout_s: float) -> bool:
    try:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(timeout_s)
    except psutil.TimeoutExpired:
        return False
    return True


def _is_here(location: WorkerLocation) -> bool:
    """Return whether a worker runs on the driver's node."""
    import ray
    import ray.util.client

    if ray.util.client.ray.is_connected():  # the context has the node of the Ray Client server
        return False
    node_id: str = ray.get_runtime_context().get_node_id()
    return location.node_id == node_id


def exit_cause(error: BaseException, location: WorkerLocation) -> str:
    """Return one line from a Ray error that says why a process ended."""
    import ray.exceptions

    if isinstance(error, ray.exceptions.OutOfMemoryError):
        figures = re.search(r"was ([\d.]+ ?GB\b.*? / [\d.]+ ?GB)", str(error))
        cause = (
            "Ray killed it because the memory of its node was nearly full"
            f"{f' ({figures[1]})' if figures else ''}. Give the node more memory or fewer "
            "workers, or reduce what a worker needs: batches, loader processes, or its state "
            "(register(sharding=...))"
        )
    else:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        cause = next((x for x in reversed(lines) if not x.startswith(_WHICH)), type(error).__name__)
        cause = cause.rpartition("Worker exit detail: ")[2].partition(" Some common causes")[0]
    return f"process {location.pid}: {cause}" if location.pid else cause


def is_worker_failure(error: BaseException) -> bool:
    if "ray" not in sys.modules:
        return False  # the only worker runs in this process

    import ray.exceptions

    return isinstance(
        error,
        HostError
        | ray.exceptions.RayActorError
        | ray.exceptions.WorkerCrashedError
        | ray.exceptions.NodeDiedError
        # Ray raises it for a worker that Ray killed. Errors of user code arrive as outcomes.
        | ray.exceptions.OutOfMemoryError,
    )


def cause_of(member: WorkerHandle | None, error: BaseException) -> str:
    """Return in one line why a worker was lost or did not start."""
    if member is not None and is_worker_failure(error):
        return without_secrets(exit_cause(error, member.location))
    cause = getattr(error, "cause", None)  # of an error that Ray brings: its text is a traceback
    text = str(error) if cause is None else f"{type(cause).__name__}: {cause}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return without_secrets(" ".join(lines[:3])) if lines else type(error).__name__
