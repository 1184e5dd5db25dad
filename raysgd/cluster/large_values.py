"""Connections that carry large values between the driver and its workers.

The object store of Ray would copy a value, and release it late. Here, a message with the pickled
value and the sizes of its buffers comes first. The buffers follow, without copies, and with padding
as in a file that can be mapped.
"""

import asyncio
import contextlib
import mmap
import pickle
import socket
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from raysgd.cluster.serialization import PackedValue, padding
from raysgd.comm import connection as messages
from raysgd.comm.connection import Address, Listener
from raysgd.comm.network import driver_address

_SMALL_BYTES = 1 << 24
"""Size up to which Ray carries the buffers of a value."""
_CONNECT_S = 30.0
_CHUNK_BYTES = 1 << 20


def fits_ray_message(packed: PackedValue) -> bool:
    return sum(packed.sizes) <= _SMALL_BYTES


# ---- from workers to the driver


class FileContent(NamedTuple):
    """An answer that is the content of a file."""

    write: Callable[[Any], None]
    """Writes it to a file that is open for writing."""
    metadata: Mapping[str, Any]
    """What the driver must know of the content."""


def send(
    inbox: Address, data: bytes, sizes: Sequence[int], write: Callable[[Any], None]
) -> Address:
    """Send a value to an `Inbox`, and wait until the driver has it. Return the address."""
    with messages.connect(inbox, _CONNECT_S) as connection:
        connection.sendall(messages.add_length(pickle.dumps((data, sizes))))
        with connection.makefile("wb", _CHUNK_BYTES) as file:
            write(file)
        connection.shutdown(socket.SHUT_WR)
        if not connection.recv(1):
            raise ConnectionAbortedError("the driver did not receive the value")
    return inbox


@final
class Inbox(contextlib.AbstractContextManager["Inbox"]):
    """Receives large values of workers on these hosts, while the context lasts.

    `open_file` returns an empty file for the buffers of a value, such as `unnamed_file`. Without
    it, they arrive in the memory of this process.
    """

    def __init__(self, hosts: Sequence[str], open_file: Callable[[], Any] | None = None) -> None:
        self._open_file = open_file
        self._received: dict[Address, PackedValue] = {}
        self._error: StorageError | None = None
        self._listener = Listener(driver_address(hosts), "raysgd-inbox")

    def expect(self) -> Address:
        """Return an address for one value."""

        async def handle(connection: socket.socket) -> None:
            data, sizes = pickle.loads(await messages.receive(connection))
            try:
                if self._open_file is None:
                    received = await _to_memory(connection, data, sizes)
                else:
                    received = await _to_file(connection, data, sizes, self._open_file)
            except StorageError as error:
                self._error = error
                raise EOFError from error
            self._received[address] = received
            await asyncio.get_running_loop().sock_sendall(connection, b"1")

        address = self._listener.expect(handle)
        return address

    def resolve(self, answer: Any) -> Any:
        """Return the value that was sent to an address, or any other answer itself."""
        return self._received.pop(answer) if isinstance(answer, Address) else answer

    def close(self) -> None:
        self._listener.close()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close()
        if self._error is not None:
            raise self._error from None


async def _to_memory(connection: socket.socket, data: bytes, sizes: Sequence[int]) -> PackedValue:
    loop, buffers = asyncio.get_running_loop(), _allocate(sizes)
    for buffer in buffers:
        unfilled = memoryview(buffer.base)
        while unfilled:
            received = await loop.sock_recv_into(connection, unfilled)
            if not received:
                raise EOFError("the worker closed the connection")
            unfilled = unfilled[received:]
    return PackedValue(data, lambda: buffers)


async def _to_file(
    connection: socket.socket, data: bytes, sizes: Sequence[int], open_file: Callable[[], Any]
) -> PackedValue:
    loop, chunk = asyncio.get_running_loop(), memoryview(bytearray(_CHUNK_BYTES))
    file = _on_disk(open_file)
    received = _map_file(data, sizes, file) if sizes else PackedValue(data)
    while size := await loop.sock_recv_into(connection, chunk):
        _on_disk(file.write, chunk[:size])
    _on_disk(file.flush)
    return received


def _allocate(sizes: Iterable[int]) -> list[Any]:
    """Return memory for buffers with their padding.

    It is used when a buffer arrives. Separate buffers can be released separately.
    """
    return [np.empty(size + padding(size), np.uint8)[:size] for size in sizes]


# ---- on the driver's disk


class StorageError(Exception):
    """The driver cannot write a state to its disk."""


def unnamed_file() -> Any:
    """Open a file that disappears with the driver, even if the driver is killed."""
    return tempfile.TemporaryFile(prefix="raysgd-")


def store_copy(packed: PackedValue) -> PackedValue:
    """Return a value that shares no memory with this one, in a file if it is large."""
    if callable(packed.buffers):  # it was received, and belongs to the caller
        return packed
    if fits_ray_message(packed):
        return PackedValue(bytes(packed.data), list(map(bytes, packed.buffers)))
    kept = _map_file(bytes(packed.data), packed.sizes, file := _on_disk(unnamed_file))
    _on_disk(packed.write, file)
    _on_disk(file.flush)
    return kept


def _map_file(data: bytes, sizes: Sequence[int], file: Any) -> PackedValue:
    """Return a value with buffers in a file. Its large arrays are pages, copied if they change."""

    def buffers() -> Iterator[memoryview]:
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        for size in sizes:
            yield content[:size]
            content = content[size + padding(size) :]

    weakref.finalize(mapping := PackedValue(data, buffers), file.close)
    return mapping


def _on_disk(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except OSError as error:
        raise StorageError(error) from error


# ---- from the driver to workers


@contextlib.contextmanager
def serve_value(packed: PackedValue, hosts: Sequence[str]) -> Iterator[PackedValue | Address]:
    """Yield what the workers need: a small value itself, or the address of a large value."""
    if fits_ray_message(packed):
        yield packed
        return

    async def handle(connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await messages.send(connection, pickle.dumps((bytes(packed.data), packed.sizes)))
        for block in packed.blocks():
            await loop.sock_sendall(connection, block)

    with contextlib.closing(Listener(driver_address(hosts), "raysgd-outbox")) as listener:
        yield listener.expect(handle)


class IncomingValue:
    """A large value whose buffers are still to come. `value` has arrays without content."""

    def __init__(self, address: Address) -> None:
        with messages.connect(address, _CONNECT_S) as connection:
            self._stream: Any = connection.makefile("rb")
        data, sizes = pickle.loads(messages.read(self._stream))
        self._buffers = _allocate(sizes)
        self.value = pickle.loads(data, buffers=self._buffers)
        self.close = self._stream.close
        self.targets: dict[int, Any] = {}
        """Other memory for buffers, by the address of the buffer."""

    @property
    def addresses(self) -> set[int]:
        return {buffer.ctypes.data for buffer in self._buffers}

    def receive(self, stops_at_target: bool = False) -> None:
        """Receive the buffers. With `stops_at_target`, stop before the first one in `targets`."""
        while self._buffers:
            own = self.targets.get(self._buffers[0].ctypes.data)
            if stops_at_target and own is not None:
                return
            buffer = self._buffers.pop(0)
            target = memoryview(buffer if own is None else own)
            rest = memoryview(bytearray(padding(len(target))))
            if any(self._stream.readinto(space) < len(space) for space in (target, rest)):
                raise EOFError("the driver closed the connection")
