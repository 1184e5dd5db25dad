"""The driver's snapshot of the state, for the case that all workers are lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import socket
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from raysgd._internal.context import Progress
from raysgd.cluster.serialization import Packed, Stream, pack
from raysgd.cluster.worker_group import WorkerGroup
from raysgd.cluster.worker_handle import WorkerHandle
from raysgd.comm.connection import Listener
from raysgd.comm.network import driver_address
from raysgd.elastic.call import RestartStateRequest
from raysgd.elastic.commands import Commands

logger = logging.getLogger(__name__)

_RECEIVE_BYTES = 1 << 20


class StorageError(Exception):
    """The driver cannot write a state to its disk."""


class StoredState:
    """A state in a temporary file without a name, or in memory if it is small.

    The file disappears with the driver, even if the driver is killed.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._file: Any = None
        if stream.sizes:
            with _storing():
                self._file = tempfile.TemporaryFile(prefix="raysgd-", buffering=0)  # noqa: SIM115
            weakref.finalize(self, self._file.close)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> StoredState:
        stored = cls(stream := Stream.of(packed := pack(state)))
        for part in stream.parts(packed.buffers) if stream.sizes else ():
            stored.add(part)
        return stored

    def add(self, part: memoryview) -> None:
        with _storing():
            while part:
                part = part[self._file.write(part) :]

    async def receive(self, connection: socket.socket) -> None:
        """Store what a worker sends, and confirm it."""
        loop, missing = asyncio.get_running_loop(), self._stream.num_bytes
        buffer = memoryview(bytearray(_RECEIVE_BYTES))
        while missing:
            received = await loop.sock_recv_into(connection, buffer[:missing])
            if not received:
                raise EOFError("the worker closed the connection")
            self.add(buffer[:received])
            missing -= received
        await loop.sock_sendall(connection, b"1")

    def value(self) -> Any:
        """Return the state. Its large arrays are pages of the file, copied if they change."""
        if self._file is None:
            return self._stream.packed.value()
        content = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._stream.value(memoryview(content))


@contextlib.contextmanager
def _storing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(error) from error


def fetch(member: WorkerHandle, step: int | None) -> Future[StoredState | None]:
    """Fetch the snapshot of a member, or None if it has none of this step."""
    stored: Future[StoredState | None] = Future()

    def begin(answer: Future[Stream | None]) -> None:
        if (error := answer.exception()) is not None:
            stored.set_exception(error)
        elif (stream := answer.result()) is None:
            stored.set_result(None)
        elif not stream.sizes:
            packed = stream.packed  # copied, because Ray's object store has the buffers
            own = Packed(bytes(packed.data), [bytearray(buffer) for buffer in packed.buffers])
            stored.set_result(StoredState(Stream(own)))
        else:
            name = "raysgd-snapshot"
            threading.Thread(target=receive, args=(stream,), name=name, daemon=True).start()

    def receive(stream: Stream) -> None:
        try:
            stored.set_result(_receive(member, stream))
        except BaseException as error:
            stored.set_exception(error)

    given = () if step is None else (step,)
    member.control("snapshot", *given).add_done_callback(begin)
    return stored


def _receive(member: WorkerHandle, stream: Stream) -> StoredState | None:
    """Receive the buffers of a snapshot through a connection of the worker."""
    state, errors = StoredState(stream), []

    async def talk(connection: socket.socket) -> None:
        try:
            await state.receive(connection)
        except StorageError as error:
            errors.append(error)

    listener = Listener(driver_address([member.info.node_ip]), "raysgd-snapshots")
    try:
        sent = member.control("send_snapshot", stream.key, listener.expect(talk)).result()
        return state if sent else None
    except Exception:
        if errors:
            raise errors[0] from None
        raise
    finally:
        listener.close()


class SnapshotKeeper:
    """Fetches snapshots during training, and keeps the newest one.

    The driver keeps the snapshot, because a worker's objects in the Ray store die with the worker.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._stored: list[StoredState] = []
        self._state: Mapping[str, Any] | StoredState | None = None
        self._step = -1
        self._coming: tuple[int, list[Future[StoredState | None]]] | None = None
        self._has_warned = False
        self._num_changes = 0

    def set(self, state: Mapping[str, Any], step: int = -1) -> None:
        """Store a state. Only snapshots with more than `step` committed steps replace it."""
        self._state, self._stored, self._coming = state, [], None
        self._step = step

    def store(self, state: Mapping[str, Any], step: int = -1) -> None:
        """Store a state as `set` does, in a file if it is large."""
        self.set(state, step)
        try:
            self._state = StoredState.of(state)
        except StorageError as error:
            self._warn_of_disk([error])  # the state stays in memory

    def outdate(self) -> None:
        """Fetch the next snapshot even if it has the same step."""
        self._step, self._coming = -1, None

    def poll(self, progress: Mapping[WorkerHandle, Progress]) -> None:
        """Fetch a newer snapshot from the members, without waiting.

        The shards of a sharded state must be of one step, so they are fetched together.
        """
        self._receive()
        if len(progress) < max(len(self._group.members), 1):
            return  # the worker with the snapshot may not have answered
        member, newest = next(iter(progress.items()))
        step = newest.snapshot
        if newest.num_changes != self._num_changes:
            self.outdate()
            self._num_changes = newest.num_changes
        if step is None:  # the last snapshot of the member is outdated
            self._step = -1
        elif self._coming is None and step > self._step:
            if not newest.divided:
                if member.remote:
                    self._coming = (step, [fetch(member, None)])
            elif [p.snapshot for p in progress.values()] == [step] * len(self._group.members):
                self._coming = (step, [fetch(each, step) for each in progress])

    @property
    def coming(self) -> Sequence[Future[Any]]:
        return () if self._coming is None else self._coming[1]

    def rescue(self, commands: Commands) -> Progress | None:
        """Store the state of a member that answers, and return its progress, if there is one."""
        reached = commands.ask_progress()
        remote = [member for member in reached if member.remote]
        each = [[m] for m in sorted(remote, key=lambda m: -reached[m].global_step)]
        is_divided = any(p.divided for p in reached.values())
        for members in [list(reached)] if is_divided else each:
            states = commands.ask_all(members, RestartStateRequest(num_workers=len(members)))
            if states and len({state.get("global_step") for state in states}) == 1:
                self.store(with_shares(states), reached[members[0]].global_step)
                return reached[members[0]]
        return None

    @property
    def exists(self) -> bool:
        self._receive()
        return bool(self._stored) or self._state is not None

    def state(self) -> Mapping[str, Any] | None:
        self._receive()
        if self._stored:
            return with_shares([each.value() for each in self._stored])
        return self._state.value() if isinstance(self._state, StoredState) else self._state

    def _receive(self) -> None:
        if self._coming is None or not all(future.done() for future in self._coming[1]):
            return
        step, futures = self._coming
        self._coming = None
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            self._warn_of_disk(errors)
            return
        stored = [each for future in futures if (each := future.result()) is not None]
        if len(stored) == len(futures):
            self._stored, self._step = stored, step

    def _warn_of_disk(self, errors: Sequence[BaseException]) -> None:
        error = next((each for each in errors if isinstance(each, StorageError)), None)
        if error is not None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The driver cannot store a snapshot in %s: %s. If all workers are lost, training "
                "restarts from the previous snapshot. Set TMPDIR to a folder with more space.",
                tempfile.gettempdir(),
                error,
            )


def with_shares(states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the state of rank 0 with the shards of all ranks."""
    state = states[0]
    if not isinstance(state, Mapping) or "shares" not in state:
        return state
    return {**state, "shares": [each["shares"] for each in states]}
