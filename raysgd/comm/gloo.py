"""A gloo process group whose waits end when another thread says so.

When a connection breaks, gloo tells the operations that wait for it, except the one whose bytes
are on their way at that moment: it is no longer in the lists that ``Pair::signalException`` walks
through (gloo/transport/tcp/pair.cc). Whoever waits for that operation waits until the timeout of
the collective. So nobody waits for gloo here: gloo completes a future of ours when it is done,
and an interruption completes it too.
"""

from __future__ import annotations

import datetime
import functools
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Store, Work
from torch.futures import Future

from raysgd.comm.mesh import Mesh

__all__ = ["SMALL_BYTES", "Entry", "GlooGroup"]

_COLLECTIVES = (
    "_allgather_base",
    "allgather_coalesced",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
)
_NEWER_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_to_all_single": "alltoall_base",
}
"""What torch.distributed calls on a group, by what a group calls on its backend."""
_NAME = "raysgd_gloo"
SMALL_BYTES = 2**19
"""Up to how many bytes a rank sends for a reduction by the mesh. For some times more, or with slow
connections, gloo is faster, whose ranks send less."""
_COMBINATIONS = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}
_SMALL_TYPES = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,  # DistributedDataParallel's map of the parameters that are used
    torch.int64,
}


class Entry:
    """The way into one group of gloo's, which `interrupt` ends at any time, also ahead.

    gloo connects in the constructor of its group, and waits there for five times its timeout where
    a peer has died since it gave its address. Nothing wakes it, so that it waits elsewhere; what
    comes of it too late is dropped.
    """

    def __init__(self) -> None:
        self._answer: SimpleQueue[Any] = SimpleQueue()

    def interrupt(self) -> None:
        """Let `connect` raise RuntimeError."""
        self._answer.put(_interruption())

    def connect(self, store: Store, rank: int, size: int, timeout: datetime.timedelta) -> Any:
        """Return gloo's group, connected."""
        answer = self._answer

        def connect() -> None:
            try:
                answer.put(dist.ProcessGroupGloo(store, rank, size, timeout=timeout))
            except Exception as error:
                answer.put(error)

        if answer.empty():  # not interrupted yet
            threading.Thread(target=connect, name="raysgd-gloo-connect", daemon=True).start()
        made = answer.get()
        self._answer = SimpleQueue()  # what comes later goes with the thread
        try:
            if isinstance(made, BaseException):
                raise made
            return made
        finally:
            del made  # an exception would hold this frame, which holds it


class GlooGroup(ProcessGroup):
    """Does what gloo does, and `interrupt` ends every wait.

    Operations that are not overridden here reach gloo through the base class, and wait as it does.
    """

    entry = Entry()
    """By which the next group is entered: torch.distributed calls the constructor, and has no
    argument for it."""

    def __init__(self, store: Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._mesh: Mesh | None = None
        entry, GlooGroup.entry = GlooGroup.entry, Entry()
        self._gloo: Any = entry.connect(store, rank, size, timeout)
        self._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, self._gloo)
        self._running = _Running()

    @staticmethod
    def init(
        store: Store,
        rank: int,
        size: int,
        timeout: datetime.timedelta,
        entry: Entry | None = None,
    ) -> GlooGroup:
        """Make such a group torch.distributed's default one."""
        GlooGroup.entry = entry or Entry()
        if _NAME not in dist.Backend.backend_list:
            dist.Backend.register_backend(_NAME, GlooGroup, devices=["cpu"])
        dist.init_process_group(_NAME, store=store, rank=rank, world_size=size, timeout=timeout)
        group = dist.group.WORLD
        assert isinstance(group, GlooGroup)
        # to everyone who asks, it is a gloo group
        groups = dist.distributed_c10d._world.pg_map
        groups[group] = (dist.Backend.GLOO, groups[group][1])
        return group

    def use(self, mesh: Mesh) -> None:
        """Reduce small tensors by a mesh of the same ranks from now on, all ranks alike."""
        self._mesh = mesh

    def allreduce(self, *args: Any, **kwargs: Any) -> Work:
        """Start gloo's allreduce, or one by the mesh."""
        if self._mesh is None or not (combine := _combination(self.size(), *args, **kwargs)):
            return _Operation(self._running, lambda: self._gloo.allreduce(*args, **kwargs))
        tensors, options = args
        given = options.timeout > datetime.timedelta()
        timeout = options.timeout if given else self._gloo.options._timeout
        return _SmallReduction(
            self._running, self._mesh, tensors, combine, timeout, options.asyncOp
        )

    def allgather(self, *args: Any) -> Work:
        """Start gathering tensors if all ranks give equally many bytes; otherwise all raise.

        Gloo would abort the process of a rank that receives more than it expects.
        """
        size = sum(tensor.nbytes for tensor in args[1])
        with torch.inference_mode(False):  # the mesh writes the result in any thread
            bounds = torch.tensor([size, -size], device="cpu")
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self.allreduce([bounds], options).wait()
        largest, smallest = bounds[0].item(), -bounds[1].item()
        if largest != smallest:
            raise ValueError(
                f"all_gather: rank {self.rank()} gave {size} bytes, but the tensors of all ranks "
                f"have from {smallest} to {largest}. Workers have different numbers of samples in "
                "the last step of an epoch, and while workers are missing. Register a DataLoader "
                'with drop_last=True and pass ElasticConfig(global_batch="scale"), or pad the '
                "tensors to one size."
            )
        return _Operation(self._running, lambda: self._gloo.allgather(*args), args[0])

    def _reduce_scatter_base(
        self, output: torch.Tensor, tensor: torch.Tensor, options: Any = None
    ) -> Work:
        """Start a sum or mean of which each rank gets its part.

        gloo would reduce all of it on every rank, which sends twice as much.
        """
        options = options or dist.ReduceScatterOptions()
        operation, size = options.reduceOp.op, self.size()
        known = operation in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        if not known or tensor.dtype not in _SMALL_TYPES or tensor.device.type != "cpu":
            start = functools.partial(self._gloo._reduce_scatter_base, output, tensor, options)
            return _Operation(self._running, start, output)
        found = torch.empty_like(tensor)

        def add(_: Any) -> list[torch.Tensor]:
            with torch.inference_mode():  # or tensors of that could not be written
                parts = found.view(size, *output.shape)
                torch.sum(parts, dim=0, out=output)
                if operation == dist.ReduceOp.AVG:
                    output.div_(size)
            return [output]

        start = functools.partial(self._gloo.alltoall_base, found, tensor, [], [])
        return _Operation(self._running, start, [output], then=add)

    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], tensors: list[torch.Tensor], options: Any = None
    ) -> Work:
        """Start gathering tensors, as torch's functional collectives and DTensor do.

        They would reach gloo with Python's lock held (torch 2.13). Gloo's thread may hold the lock
        of its queue then and need Python's, so that both would wait for ever.
        """
        chunks = [output.chunk(self.size()) for output in outputs]
        by_rank = [list(parts) for parts in zip(*chunks, strict=True)]
        return _Operation(
            self._running, lambda: self._gloo.allgather_coalesced(by_rank, tensors), outputs
        )

    all_gather_single_coalesced = allgather_into_tensor_coalesced  # type: ignore[assignment]

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], tensors: list[torch.Tensor], options: Any = None
    ) -> Work:
        """Start reductions of which each rank gets its parts, as those do; one after the other."""
        *before, last = zip(outputs, tensors, strict=True)
        for output, tensor in before:
            self._reduce_scatter_base(output, tensor, options).wait()
        return self._reduce_scatter_base(*last, options)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced  # type: ignore[assignment]

    @property
    def num_operations(self) -> int:
        """Number of operations that this rank has begun, also those that have ended."""
        return self._running.num_begun

    def collective(self) -> int | None:
        """Return the number of the oldest collective under way; None if there is none."""
        if self._mesh is not None:
            self._mesh.look()
        return self._running.oldest()

    def interrupt(self) -> None:
        """Let operations that are under way, and all later ones, raise RuntimeError."""
        self._running.interrupt()

    def release(self) -> None:
        """Prepare to be forgotten, after `interrupt` or when all operations have ended.

        gloo's destructor waits for its threads. Where one of them never comes back, the
        destructor must not run: the thread and a few sockets are lost until the process ends.
        """
        if not self._running.ended():
            threading.Thread(
                target=_keep, args=(self._gloo, self._running), name="raysgd-gloo-end", daemon=True
            ).start()

    def send(self, tensors: list[torch.Tensor], *to: Any) -> Work:
        """Send tensors to one rank."""
        return self._transfer(lambda: self._gloo.send(tensors, *to), tensors)

    def recv(self, tensors: list[torch.Tensor], *source: Any) -> Work:
        """Receive tensors from one rank."""
        return self._transfer(lambda: self._gloo.recv(tensors, *source), tensors)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Work:
        """Receive tensors from any rank."""
        return self._transfer(lambda: self._gloo.recv_anysource(tensors, tag), tensors)

    def _transfer(self, start: Callable[[], Any], tensors: list[torch.Tensor]) -> Work:
        return _Operation(self._running, start, tensors, is_collective=False)


def _keep(gloo: Any, running: _Running) -> None:
    """Hold a group of gloo's until its last operation has ended."""
    running.wait_for_end()


def _collective(name: str) -> Callable[..., Work]:
    def method(self: GlooGroup, *args: Any, **kwargs: Any) -> Work:
        output = args[0] if args else None  # it comes first in all of them
        return _Operation(self._running, lambda: getattr(self._gloo, name)(*args, **kwargs), output)

    method.__name__ = name
    method.__doc__ = f"Start gloo's {name}."
    return method


for _name in _COLLECTIVES:
    setattr(GlooGroup, _name, _collective(_name))
for _name, _older in _NEWER_NAMES.items():
    setattr(GlooGroup, _name, _collective(_older))


class _Running:
    """The operations of a group that somebody may wait for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waits: dict[int, Callable[[BaseException], None]] = {}
        self._collectives: dict[int, int] = {}
        self._num_collectives = 0
        self._count = 0
        self.num_begun = 0
        self._interrupted = False

    def begin(
        self, key: int, end: Callable[[BaseException], None], collective: bool = False
    ) -> None:
        """Note an operation, and how to end the wait for it; a collective is one of all ranks."""
        with self._changed:
            if self._interrupted:
                raise _interruption()
            self._waits[key] = end
            self._count += 1
            self.num_begun += 1
            if collective:
                self._num_collectives += 1
                self._collectives[key] = self._num_collectives

    def finish(self, key: int) -> bool:
        """Note that gloo is done; return whether somebody may still wait."""
        with self._changed:
            self._count -= 1
            self._collectives.pop(key, None)
            self._changed.notify_all()
            return self._waits.pop(key, None) is not None

    def oldest(self) -> int | None:
        """Return the number of the oldest collective that gloo is not done with."""
        with self._changed:
            return min(self._collectives.values(), default=None)

    def interrupt(self) -> None:
        """End all waits."""
        with self._changed:
            self._interrupted = True
            waits = list(self._waits.values())
            self._waits.clear()
        for end in waits:
            end(_interruption())

    def ended(self) -> bool:
        """Whether gloo is done with all operations."""
        with self._changed:
            return self._count == 0

    def wait_for_end(self) -> None:
        """Wait, for ever where gloo has forgotten one, until it is done with all operations."""
        with self._changed:
            self._changed.wait_for(lambda: self._count == 0)


class _Operation(Work):
    """A collective or a transfer under way; its future holds what gloo returned, or an error.

    Where something is made of that, `then` does so.
    """

    def __init__(
        self,
        running: _Running,
        start: Callable[[], Any],
        output: Any = None,
        is_collective: bool = True,
        then: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__()
        self._ended: Future[Any] = Future()
        self._outputs: list[Any] | None = None if then is None else output
        ended = self._ended
        key = id(ended)  # which lives until gloo is done; the work may be dropped before
        running.begin(key, ended.set_result, is_collective)
        try:
            self._work = start()
        except BaseException:
            running.finish(key)
            raise

        # Nothing here may hold the group: this runs in a thread of gloo's, which cannot outlive it.
        def finish(value: Callable[[], Any]) -> None:
            try:
                found = value() if then is None else then(value())
            except Exception as error:
                found = error.with_traceback(None)  # whose frames hold tensors
            if running.finish(key):
                ended.set_result(found)

        try:
            future = self._work.get_future()
        except RuntimeError:  # some operations have none: a thread waits for them
            work, self._outputs = self._work, output if isinstance(output, list) else [output]
            outputs = self._outputs
            waiting = threading.Thread(
                target=finish,
                args=(lambda: _waited_for(work, outputs),),
                name="raysgd-gloo",
                daemon=True,
            )
            try:
                waiting.start()
            except BaseException:
                running.finish(key)
                raise
        else:
            future.add_done_callback(lambda done: finish(done.value))

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait for the end.

        Raises:
            RuntimeError: if it failed, was interrupted, or took longer than `timeout`.
        """
        if timeout:
            done = threading.Event()
            self._ended.add_done_callback(lambda _: done.set())
            if not done.wait(timeout.total_seconds()):
                raise RuntimeError(f"gloo/ {timeout.total_seconds():g} s are over: timed out.")
        self._ended.wait()
        _value(self._ended)
        return True

    def get_future(self) -> Future[Any]:
        """Return a future that fails where this fails, also for those who wait in C++."""
        return self._ended.then(_value)

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return self._ended.done()

    def is_success(self) -> bool:
        """Whether it has ended, and well."""
        return self.is_completed() and not isinstance(self._ended.value(), BaseException)

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that it is about."""
        self.wait()
        if self._outputs is not None:
            return self._outputs
        self._work.wait()  # gloo's work ends a moment after its future
        tensors: list[torch.Tensor] = self._work.result()
        return tensors

    def _source_rank(self) -> int:
        return int(self._work._source_rank())


def _waited_for(work: Any, outputs: list[Any]) -> list[Any]:
    # gloo's work writes the result as it is waited for, in the caller's thread most often; without
    # this tensors of inference mode could not be written here
    with torch.inference_mode():
        work.wait()
    return outputs


def _combination(size: int, tensors: Any, options: Any = None, **more: Any) -> Any:
    """Return how a mesh of so many ranks combines two tensors; None where gloo has to do it.

    It depends on nothing but what has to be the same on all ranks in any case.
    """
    if not isinstance(options, dist.AllreduceOptions) or more or len(tensors) != 1:
        return None
    (tensor,) = tensors
    if (
        tensor.device.type != "cpu"
        or tensor.layout != torch.strided
        or tensor.dtype not in _SMALL_TYPES
        or tensor.numel() * tensor.element_size() * (size - 1) > SMALL_BYTES
    ):
        return None
    return _COMBINATIONS.get(options.reduceOp.op)  # type: ignore[attr-defined]


def _in_backward_pass() -> bool:
    return torch._C._current_graph_task_id() != -1


class _SmallReduction(Work):
    """A reduction by the mesh."""

    def __init__(
        self,
        running: _Running,
        mesh: Mesh,
        tensors: list[torch.Tensor],
        combine: Any,
        timeout: datetime.timedelta,
        is_async: bool,
    ) -> None:
        super().__init__()
        self._mesh, self._tensors, self._timeout = mesh, tensors, timeout
        key = object()  # lives until the end
        running.begin(id(key), lambda _: None, collective=True)

        def at_end() -> None:
            running.finish(id(key))

        try:
            self._reduction = mesh.start(tensors[0], combine, at_end)
        except BaseException:
            at_end()
            raise
        if is_async and not _in_backward_pass():
            # an asynchronous operation: drive it even if nobody waits for it
            self._finish_elsewhere(Future())

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait for the end.

        Raises:
            RuntimeError: if it failed, was interrupted, or took longer than `timeout`.
        """
        if timeout:
            self._mesh.finish(self._reduction, timeout.total_seconds(), give_up=False)
        else:
            self._mesh.finish(self._reduction, self._timeout.total_seconds())
        return True

    def get_future(self) -> Future[Any]:
        """Return a future of the tensors, which is ready within a backward pass.

        DistributedDataParallel asks for it there and has nothing else to do until it is: to wait
        in its thread saves waking another one.
        """
        ended: Future[Any] = Future()
        if _in_backward_pass():
            self._finish(ended)
        else:
            self._finish_elsewhere(ended)
        return ended.then(_value)

    def _finish_elsewhere(self, ended: Future[Any]) -> None:
        threading.Thread(
            target=self._finish, args=(ended,), name="raysgd-mesh", daemon=True
        ).start()

    def _finish(self, ended: Future[Any]) -> None:
        try:
            self.wait()
        except RuntimeError as error:
            ended.set_result(error)
        else:
            ended.set_result(self._tensors)

    def is_completed(self) -> bool:
        """Whether it has ended."""
        self._mesh.look()
        return self._reduction.done or self._mesh.broken

    def is_success(self) -> bool:
        """Whether it has ended, and well."""
        return self.is_completed() and self._reduction.done

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that it is about."""
        self.wait()
        return self._tensors


def _value(ended: Future[Any]) -> Any:
    value = ended.value()
    if isinstance(value, BaseException):
        raise value
    return value


def _interruption() -> RuntimeError:
    return RuntimeError("gloo/ The driver interrupted this collective.")
