"""A gloo process group whose waits another thread can interrupt.

When a connection breaks, gloo notifies all operations except the operation in transfer, which is
no longer in the lists of ``Pair::signalException`` (gloo/transport/tcp/pair.cc). That operation
would wait until the timeout of the collective. Therefore no thread waits for gloo here.
Callers wait for a future that either gloo or an interruption completes.
"""

from __future__ import annotations

import concurrent.futures
import functools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup, Store, Work
from torch.futures import Future

from raysgd._internal import step_timing
from raysgd._internal.forwarding import forward_to
from raysgd.comm.mesh import PeerMesh

_COLLECTIVES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "allgather_coalesced",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
)
_NEWER_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
}
"""Group methods that torch.distributed calls, by the backend method that implements each."""
_TRANSFERS = ("send", "recv", "recv_anysource")
_NAME = "raysgd_gloo"
SMALL_BYTES = 2**19
"""Maximum number of bytes that a rank sends for a reduction by the mesh. For larger tensors or slow
connections, gloo is faster because its ranks send less."""
_COMBINATIONS = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}
_TYPES = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64}


class GlooGroup(ProcessGroup):
    """A gloo group. `interrupt` ends the waits of all operations that this class defines."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.mesh: PeerMesh | None = None
        """Reduces small tensors. All ranks must set it after the same collective."""
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, self._gloo)
        # PyTorch 2.15 asks the default backend for its name.
        self._set_default_backend(ProcessGroup.BackendType.GLOO)
        self._running = _RunningOperations()

    @staticmethod
    def init(store: Store, rank: int, size: int, timeout: timedelta) -> GlooGroup:
        """Create the default process group of torch.distributed."""
        if _NAME not in dist.Backend.backend_list:
            dist.Backend.register_backend(_NAME, GlooGroup, devices=["cpu"])
        dist.init_process_group(_NAME, store=store, rank=rank, world_size=size, timeout=timeout)
        group = dist.group.WORLD
        assert isinstance(group, GlooGroup)
        # `dist.get_backend` must return "gloo".
        groups = dist.distributed_c10d._world.pg_map
        groups[group] = (dist.Backend.GLOO, groups[group][1])
        return group

    def allreduce(self, *args: Any, **kwargs: Any) -> Work:
        mesh = self.mesh
        if mesh is None or not (combine := _combination(self.size(), *args, **kwargs)):
            return _Operation(self._running, lambda: self._gloo.allreduce(*args, **kwargs))
        tensors, options = args
        has_own = options.timeout > timedelta()
        timeout_s = (options.timeout if has_own else self._gloo.options._timeout).total_seconds()
        # DistributedDataParallel would wait for the result immediately.
        in_thread = options.asyncOp and torch._C._current_graph_task_id() == -1
        phase = None if in_thread else step_timing.begin_phase(step_timing.WAIT)
        try:
            return _Operation(
                self._running,
                lambda: mesh.all_reduce(tensors[0], combine, timeout_s, in_thread),
                tensors,
            )
        finally:
            step_timing.resume_phase(phase)

    def broadcast(self, *args: Any, **kwargs: Any) -> Work:
        sent, *options = args
        if isinstance(sent, list):
            # DistributedDataParallel passes conjugated tensors, which gloo refuses.
            sent = [each.conj() if each.is_conj() else each for each in sent]
        start = functools.partial(self._gloo.broadcast, sent, *options, **kwargs)
        return _Operation(self._running, start, args[0])

    def allgather(self, *args: Any) -> Work:
        """Start an all-gather. Raise on all ranks if their sizes differ.

        gloo would abort the process of a rank that receives more bytes than it expects.
        """
        size = sum(tensor.nbytes for tensor in args[1])
        with torch.inference_mode(False):  # another thread may write the result
            bounds = torch.tensor([size, -size], device="cpu")
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self.allreduce([bounds], options).wait()
        largest, smallest = bounds[0].item(), -bounds[1].item()
        if largest != smallest:
            raise ValueError(
                f"all_gather: the ranks passed {smallest} to {largest} bytes (rank {self.rank()}: "
                f"{size}), but all must pass the same number. Batches differ in the last step of "
                "an epoch and while workers are missing. Pad the tensors, or register a DataLoader "
                'with drop_last=True and pass ElasticConfig(global_batch="scale").'
            )
        return _Operation(self._running, lambda: self._gloo.allgather(*args), args[0])

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], tensors: list[torch.Tensor], options: Any = None
    ) -> Work:
        """Start all-gathers, because DTensor in PyTorch 2.13 holds the GIL when it calls gloo."""
        chunks = [output.chunk(self.size()) for output in outputs]
        by_rank = [list(each) for each in zip(*chunks, strict=True)]
        return _Operation(
            self._running, lambda: self._gloo.allgather_coalesced(by_rank, tensors), outputs
        )

    all_gather_single_coalesced = allgather_into_tensor_coalesced  # type: ignore[assignment]

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], tensors: list[torch.Tensor], *options: Any
    ) -> Work:
        *before, last = zip(outputs, tensors, strict=True)
        for output, tensor in before:
            self._reduce_scatter_base(output, tensor, *options).wait()
        return self._reduce_scatter_base(*last, *options)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced  # type: ignore[assignment]

    num_operations: int = forward_to(
        "_running.num_begun", "Number of operations that this rank has started."
    )

    def current_collective(self) -> int | None:
        """See `CollectiveBackend.current_collective`."""
        return self._running.oldest()

    def interrupt(self) -> None:
        """Make all current and later operations raise RuntimeError."""
        self._running.interrupt()

    def release(self) -> None:
        """Prepare for garbage collection, after `interrupt` or after all operations have ended.

        The destructor of gloo waits for threads that may never return.
        """
        running = self._running
        if not running.wait_for_end(0):
            threading.Thread(
                target=lambda gloo: running.wait_for_end(),
                args=(self._gloo,),
                name="raysgd-gloo-end",
                daemon=True,
            ).start()


def _operation(name: str, is_collective: bool) -> Callable[..., Work]:
    def method(self: GlooGroup, *args: Any, **kwargs: Any) -> Work:
        output = args[0] if args else None  # all operations take it as first argument
        start = functools.partial(getattr(self._gloo, name), *args, **kwargs)
        return _Operation(self._running, start, output, is_collective)

    method.__name__ = name
    return method


for _name in (*_COLLECTIVES, *_TRANSFERS, *_NEWER_NAMES):
    setattr(GlooGroup, _name, _operation(_NEWER_NAMES.get(_name, _name), _name not in _TRANSFERS))


class _RunningOperations:
    """The unfinished operations of a group."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._setters: dict[int, Callable[[Any], None]] = {}  # of the results of futures
        self._active: dict[int, int] = {}  # numbers of the collectives, and -1 of transfers
        self._num_collectives = 0
        self.num_begun = 0
        self._is_interrupted = False

    def begin(self, key: int, end: Callable[[Any], None], is_collective: bool) -> None:
        with self._changed:
            if self._is_interrupted:
                raise _interruption()
            self._setters[key] = end
            self.num_begun += 1
            self._num_collectives += is_collective
            self._active[key] = self._num_collectives if is_collective else -1

    def finish(self, key: int, result: Any = None) -> None:
        """End the future of an operation, unless an interruption has. Then record the end."""
        with self._changed:
            end = self._setters.pop(key, None)
        if end is not None:
            end(result)
        with self._changed:
            self._active.pop(key, None)
            self._changed.notify_all()

    def oldest(self) -> int | None:
        with self._changed:
            numbers = [number for key, number in self._active.items() if key in self._setters]
            return min((number for number in numbers if number > 0), default=None)

    def interrupt(self) -> None:
        with self._changed:
            self._is_interrupted = True
            setters = list(self._setters.values())
            self._setters.clear()
        for end in setters:
            end(_interruption())

    def wait_for_end(self, timeout_s: float | None = None) -> bool:
        """Return whether all operations have ended, after waiting for at most `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._active, timeout_s)


class _Operation(Work):
    """A running collective or transfer. Its future holds the result, or an error."""

    def __init__(
        self,
        running: _RunningOperations,
        start: Callable[[], Any],
        output: Any = None,
        is_collective: bool = True,
    ) -> None:
        super().__init__()
        self._future: Future[Any] = Future()
        self._outputs: list[Any] | None = None
        key = id(self._future)  # unlike the Work, the future lives until gloo has finished
        running.begin(key, self._future.set_result, is_collective)

        # Do not refer to the group here: a gloo thread runs this, and cannot outlive the group.
        def finish(value: Callable[[], Any]) -> None:
            try:
                result = value()
            except Exception as error:
                result = error.with_traceback(None)  # frames hold tensors
            # The destructor of gloo waits for this thread, and this thread needs the GIL.
            running.finish(key, result)

        try:
            work = self._work = start()
            if isinstance(work, concurrent.futures.Future):  # the mesh reduces in place
                self._outputs = output
                work.add_done_callback(lambda done: finish(lambda: done.result() or output))
                return
            try:
                future = work.get_future()
            except RuntimeError:  # operations without a future need a thread that waits
                outputs = self._outputs = output if isinstance(output, list) else [output]
                args = (lambda: _wait_for(work, outputs),)
                threading.Thread(target=finish, args=args, name="raysgd-gloo", daemon=True).start()
            else:
                future.add_done_callback(lambda done: finish(done.value))
        except BaseException:
            running.finish(key)
            raise

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout:
            done = threading.Event()
            self._future.add_done_callback(lambda _: done.set())
            if not done.wait(timeout.total_seconds()):
                raise RuntimeError(f"gloo/ Timed out after {timeout.total_seconds():g} s.")
        if not self._future.done():
            phase = step_timing.begin_phase(step_timing.WAIT)
            self._future.wait()
            step_timing.resume_phase(phase)
        _value(self._future)
        return True

    def get_future(self) -> Future[Any]:
        """Return a future that fails if the operation fails, also for waiters in C++."""
        return self._future.then(_value)

    def is_completed(self) -> bool:
        return self._future.done()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        if self._outputs is not None:
            return self._outputs
        self._work.wait()  # the Work in gloo ends shortly after its future
        tensors: list[torch.Tensor] = self._work.result()
        return tensors

    def _source_rank(self) -> int:
        return int(self._work._source_rank())


def _wait_for(work: Any, outputs: list[Any]) -> list[Any]:
    # gloo writes the result in the waiting thread, and the outputs can be inference tensors.
    with torch.inference_mode():
        work.wait()
    return outputs


def _combination(size: int, tensors: Any, options: Any = None, **more: Any) -> Any:
    """Return how a mesh of `size` ranks combines two tensors, or None to use gloo.

    The choice depends only on arguments that are equal on all ranks.
    """
    if not isinstance(options, dist.AllreduceOptions) or more or len(tensors) != 1:
        return None
    (tensor,) = tensors
    if (
        tensor.device.type != "cpu"
        or tensor.layout != torch.strided
        or tensor.dtype not in _TYPES
        or tensor.numel() * tensor.element_size() * (size - 1) > SMALL_BYTES
    ):
        return None
    return _COMBINATIONS.get(options.reduceOp.op)  # type: ignore[attr-defined]


def _value(future: Future[Any]) -> Any:
    value = future.value()
    if isinstance(value, BaseException):
        raise value
    return value


def _interruption() -> RuntimeError:
    return RuntimeError("gloo/ The driver interrupted this collective.")
