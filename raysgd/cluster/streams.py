"""Connections that carry large values between the driver and its workers.

The object store of Ray would copy a value, and release it late. Here, a message with the pickled
value and the sizes of its buffers comes first. The buffers follow, without copies.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import pickle
import socket
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from raysgd.checkpoint.manifest import HashingFile
from raysgd.cluster.serialization import Packed
from raysgd.comm import connection as messages
from raysgd.comm.connection import Address, Listener
from raysgd.comm.network import driver_address

_SMALL_BYTES = 1 << 24
"""Size up to which Ray carries the buffers of a value."""
_CONNECT_S = 30.0
_CHUNK_BYTES = 1 << 20
_ALIGNMENT = 64


def is_small(packed: Packed) -> bool:
    return sum(_sizes(packed)) <= _SMALL_BYTES


def _sizes(packed: Packed) -> list[int]:
    return [memoryview(buffer).nbytes for buffer in packed.buffers]


class Ticket(NamedTuple):
    """Stands for a large value that a worker sends to an `Inbox`."""

    key: bytes


def new_ticket() -> Ticket:
    return Ticket(os.urandom(16))


def send(
    packed: Packed, ticket: Ticket, address: Address, on_part: Callable[[], Any] = lambda: None
) -> None:
    """Send a value to an `Inbox`, and wait until the driver has it."""
    with _opened(address, ticket, bytes(packed.data), _sizes(packed)) as connection:
        for buffer in packed.buffers:
            connection.sendall(pickle.PickleBuffer(buffer).raw())
            on_part()


@contextlib.contextmanager
def _opened(address: Address, *header: Any) -> Iterator[socket.socket]:
    with messages.connect(address, _CONNECT_S) as connection:
        connection.sendall(messages.framed(pickle.dumps(header)))
        yield connection
        connection.shutdown(socket.SHUT_WR)
        if not connection.recv(1):
            raise ConnectionAbortedError("the driver did not receive the value")


class Content(NamedTuple):
    """An answer that is the content of a file."""

    write: Callable[[Any], None]
    """Writes it to a file that is open for writing."""
    facts: Mapping[str, Any]
    """What the driver must know of the content."""

    def send(self, ticket: Ticket, address: Address) -> None:
        """Write to a file of the driver, and wait until the driver has everything."""
        with (
            _opened(address, ticket, pickle.dumps(self.facts), ()) as connection,
            connection.makefile("wb", _CHUNK_BYTES) as file,
        ):
            self.write(file)


class StorageError(Exception):
    """The driver cannot write a state to its disk."""


class StoredState:
    """A packed value in a temporary file without a name.

    The file disappears with the driver, even if the driver is killed.
    """

    def __init__(self, data: bytes, sizes: Sequence[int]) -> None:
        self._data, self._sizes = data, sizes
        with _storing():
            self._file = tempfile.TemporaryFile(prefix="raysgd-", buffering=0)  # noqa: SIM115
        weakref.finalize(self, self._file.close)

    @classmethod
    def of(cls, packed: Packed) -> StoredState:
        stored = cls(bytes(packed.data), _sizes(packed))
        for buffer in packed.buffers:
            stored.add(pickle.PickleBuffer(buffer).raw())
            stored.align()
        return stored

    def add(self, part: memoryview) -> None:
        with _storing():
            while part:
                part = part[self._file.write(part) :]

    def align(self) -> None:
        self.add(memoryview(bytes(-self._file.tell() % _ALIGNMENT)))

    async def receive(self, connection: socket.socket) -> None:
        chunk = memoryview(bytearray(_CHUNK_BYTES))
        for size in self._sizes:
            for start in range(0, size, _CHUNK_BYTES):
                part = chunk[: size - start]
                await _receive(connection, part)
                self.add(part)
            self.align()

    def value(self) -> Any:
        """Return the value. Its large arrays are pages of the file, copied if they change."""
        content = memoryview(mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY))
        buffers, start = [], 0
        for size in self._sizes:
            buffers.append(content[start : start + size])
            start += -(-size // _ALIGNMENT) * _ALIGNMENT
        return pickle.loads(self._data, buffers=buffers)


@contextlib.contextmanager
def _storing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(error) from error


class ReceivedValue:
    """A packed value in the memory of this process."""

    def __init__(self, data: bytes, sizes: Sequence[int]) -> None:
        self._data = data
        # Memory is used when a buffer arrives. Separate buffers can be released separately.
        self.buffers: list[Any] = [np.empty(size, np.uint8) for size in sizes]

    async def receive(self, connection: socket.socket) -> None:
        for buffer in self.buffers:
            await _receive(connection, memoryview(buffer))

    def value(self) -> Any:
        return pickle.loads(self._data, buffers=self.buffers)


class ReceivedFile:
    """The `Content` of a worker in a file of the driver."""

    def __init__(self, file: HashingFile, data: bytes, sizes: Sequence[int]) -> None:
        self._file, self.facts = file, pickle.loads(data)

    async def receive(self, connection: socket.socket) -> None:
        loop, chunk = asyncio.get_running_loop(), memoryview(bytearray(_CHUNK_BYTES))
        with _storing():
            self._file.restart()  # an earlier attempt may have written a part
            while received := await loop.sock_recv_into(connection, chunk):
                self._file.write(chunk[:received])


async def _receive(connection: socket.socket, place: memoryview) -> None:
    loop = asyncio.get_running_loop()
    while place:
        received = await loop.sock_recv_into(connection, place)
        if not received:
            raise EOFError("the worker closed the connection")
        place = place[received:]


class Incoming:
    """A large value whose buffers are still to come. `value` has arrays without content."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._receive(length := memoryview(bytearray(8)))
        self._receive(header := memoryview(bytearray(int.from_bytes(length))))
        received = ReceivedValue(*pickle.loads(header))
        self._buffers, self.value = received.buffers, received.value()

    @property
    def addresses(self) -> set[int]:
        return {buffer.ctypes.data for buffer in self._buffers}

    def fill(self, places: Mapping[int, Any], before: bool = False) -> None:
        """Receive the buffers, in `places` by their addresses.

        With `before`, only receive the buffers before the first one with a place.
        """
        while self._buffers:
            place = places.get(self._buffers[0].ctypes.data)
            if before and place is not None:
                return
            buffer = self._buffers.pop(0)
            self._receive(memoryview(buffer if place is None else place))

    def _receive(self, place: memoryview) -> None:
        while place:
            received = self._connection.recv_into(place, 0, socket.MSG_WAITALL)
            if not received:
                raise EOFError("the driver closed the connection")
            place = place[received:]


@contextlib.contextmanager
def incoming(address: Address) -> Iterator[Incoming]:
    with messages.connect(address, _CONNECT_S) as connection:
        yield Incoming(connection)


@contextlib.contextmanager
def offered(packed: Packed, hosts: Sequence[str]) -> Iterator[Packed | Address]:
    """Yield what the workers need: a small value itself, or the address of a large value."""
    if is_small(packed):
        yield packed
        return

    async def talk(connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await messages.send(connection, pickle.dumps((bytes(packed.data), _sizes(packed))))
        for buffer in packed.buffers:
            await loop.sock_sendall(connection, pickle.PickleBuffer(buffer).raw())

    listener = Listener(driver_address(hosts), "raysgd-outbox")
    try:
        yield listener.expect(talk)
    finally:
        listener.close()


class Inbox:
    """Receives large values of workers on these hosts, while the context lasts.

    `kind` is `StoredState`, `ReceivedValue`, or a function that returns a `ReceivedFile`.
    """

    def __init__(self, hosts: Sequence[str], kind: Callable[..., Any]) -> None:
        self._kind = kind
        self._received: dict[Ticket, Any] = {}
        self._error: StorageError | None = None
        self._listener = Listener(driver_address(hosts), "raysgd-inbox")
        self.address = self._listener.expect(self._talk)

    async def _talk(self, connection: socket.socket) -> None:
        try:
            ticket, data, sizes = pickle.loads(await messages.receive(connection))
            received = self._kind(data, sizes)
            await received.receive(connection)
        except StorageError as error:
            self._error = error
            raise EOFError from error
        self._received[ticket] = received
        await asyncio.get_running_loop().sock_sendall(connection, b"1")

    def take(self, answer: Any) -> Any:
        """Return the value that a ticket stands for, or any other answer itself."""
        return self._received.pop(answer) if isinstance(answer, Ticket) else answer

    def close(self) -> None:
        self._listener.close()

    def __enter__(self) -> Inbox:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close()
        if self._error is not None:
            raise self._error from None
