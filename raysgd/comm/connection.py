"""Authenticated connections and messages between raysgd's processes.

One process listens with a `Listener`. Others receive its `Address` through Ray or through another
connection, and call `connect`. Before either end reads a message, both prove that they know the
key of the address. Each end answers the other's random bytes with their HMAC-SHA-256 (RFC 2104), so
the key never travels::

    connecting                               listening
    "sgd2", name (16), random bytes (32) ─▶
                                         ◀─  random bytes (32), proof (32)
    proof (32)                           ─▶
    messages                            ◀─▶  messages

A listener reads only these bytes from an unknown peer, for at most `_HANDSHAKE_S` seconds. Slow
peers do not delay others. Messages are neither encrypted nor signed. A message is the length of its
content (eight bytes, big-endian) and the content.
"""

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import BinaryIO, NamedTuple

from raysgd.comm.network import shut_down

logger = logging.getLogger(__name__)

Handler = Callable[[socket.socket], Awaitable[None]]

_LENGTH = struct.Struct("!Q")
_MAGIC = b"sgd2"
"""First bytes of a connecting process. Other bytes are rejected before a full hello arrives."""
_NAME_BYTES = 16
_RANDOM_BYTES = 32
_PROOF_BYTES = 32
_HANDSHAKE_S = 60.0
"""Timeout of a handshake in seconds, equal to that of a connecting process: both can be busy."""
_MAX_UNAUTHENTICATED = 256
"""Maximum number of simultaneous handshakes. A further one closes the oldest."""
_RETRY_S = 0.5  # seconds to pause after a failed accept
_CLOSE_S = 5.0
_READ_BYTES = 1 << 20
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}
"""Keepalive of silent connections (seconds, seconds, probes) and the limit for unacknowledged data
(milliseconds). Both report a lost host after 60 s."""


class Address(NamedTuple):
    """Host, port, and shared key of a listener."""

    host: str
    port: int
    key: str


def derive_key(key: str, purpose: str) -> str:
    return hmac.digest(key.encode(), b"key for " + purpose.encode(), "sha256").hex()


def _name(key: str) -> bytes:
    """Return the public identifier of a key, which the listener uses to find the key."""
    return hmac.digest(key.encode(), b"name", "sha256")[:_NAME_BYTES]


def _proof(key: str, role: bytes, listening: bytes, connecting: bytes) -> bytes:
    return hmac.digest(key.encode(), role + listening + connecting, "sha256")


def connect(address: Address, timeout_s: float, reach_s: float = 5.0) -> socket.socket:
    """Connect to a listener within `timeout_s`. Return a blocking socket, ready for messages.

    The remote kernel must accept within `reach_s`. Raise OSError if the connection fails.
    """
    ends = time.monotonic() + timeout_s
    connection = socket.socket()
    try:
        connection.settimeout(max(min(reach_s, timeout_s), 1e-3))
        connection.connect((address.host, address.port))
        keep_alive(connection)
        mine = secrets.token_bytes(_RANDOM_BYTES)
        connection.sendall(_MAGIC + _name(address.key) + mine)
        answer = b""
        while len(answer) < _RANDOM_BYTES + _PROOF_BYTES:
            connection.settimeout(max(ends - time.monotonic(), 1e-3))
            if not (chunk := connection.recv(_RANDOM_BYTES + _PROOF_BYTES - len(answer))):
                raise ConnectionAbortedError("the listener has closed the connection")
            answer += chunk
        theirs, proof = answer[:_RANDOM_BYTES], answer[_RANDOM_BYTES:]
        if not hmac.compare_digest(proof, _proof(address.key, b"listening", theirs, mine)):
            raise ConnectionAbortedError("the listener does not know the key")
        connection.sendall(_proof(address.key, b"connecting", theirs, mine))
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def keep_alive(connection: socket.socket, options: Mapping[str, int] = _KEEPALIVE) -> None:
    """Disable Nagle's algorithm, and detect a lost host by keepalive with these options."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in options.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


# ---- messages


def add_length(content: bytes) -> bytes:
    """Return `content` with its length in front."""
    return _LENGTH.pack(len(content)) + content


def read(stream: BinaryIO) -> bytes:
    """Return the next message of a blocking stream. Raise EOFError if it was closed."""
    header = stream.read(_LENGTH.size)
    if len(header) == _LENGTH.size:
        (length,) = _LENGTH.unpack(header)
        content = stream.read(length)
        if len(content) == length:
            return content
    raise EOFError("the connection was closed")


async def receive(connection: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(await receive_exactly(connection, _LENGTH.size))
    return await receive_exactly(connection, length)


async def send(connection: socket.socket, content: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, add_length(content))


async def receive_exactly(connection: socket.socket, length: int) -> bytes:
    loop, chunks = asyncio.get_running_loop(), []
    while length:
        if not (chunk := await loop.sock_recv(connection, min(length, _READ_BYTES))):
            raise EOFError("the connection was closed")
        chunks.append(chunk)
        length -= len(chunk)
    return b"".join(chunks)


# ---- listening


class Listener:
    """Listens on a free port of `host`, in its own thread, until `close`."""

    def __init__(self, host: str, name: str) -> None:
        self._server = socket.create_server((host, 0), backlog=1024)
        self._server.setblocking(False)
        self._endpoint: tuple[str, int] = self._server.getsockname()
        self._expected: dict[bytes, tuple[str, Handler]] = {}
        self._connections: dict[socket.socket, asyncio.Task[None]] = {}
        self._unauthenticated: dict[socket.socket, None] = {}
        self._closed = asyncio.Event()
        # Ignore the program's event loop policy, because `detach` needs a selector loop.
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def expect(self, handler: Handler, key: str | None = None) -> Address:
        """Accept connections of peers that know `key`, and return the address for them.

        `handler` handles one connection in the listener's thread. The connection closes when it
        returns, unless it calls ``detach`` on the socket.
        """
        key = secrets.token_hex(_RANDOM_BYTES) if key is None else key
        self._expected[_name(key)] = key, handler
        return Address(*self._endpoint, key)

    def forget(self, address: Address) -> None:
        """Refuse further connections to `address`."""
        self._expected.pop(_name(address.key), None)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._closed.set)
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        finally:
            # A task that is cancelled before its first step does not close its connection, and its
            # peer would keep waiting.
            for opened in (self._server, *self._connections):
                shut_down(opened)
                opened.close()

    async def _serve(self) -> None:
        self._listen()
        await self._closed.wait()
        self._loop.remove_reader(self._server)

    def _listen(self) -> None:
        # A cancelled `sock_accept` can lose an accepted connection, so a callback accepts.
        if not self._closed.is_set():
            self._loop.add_reader(self._server, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the peer has left
            return
        except OSError:  # most likely out of file descriptors
            self._dismiss_oldest()
            self._loop.remove_reader(self._server)
            self._loop.call_later(_RETRY_S, self._listen)
            return
        connection.setblocking(False)
        self._unauthenticated[connection] = None
        self._connections[connection] = self._loop.create_task(self._handle(connection))
        if len(self._unauthenticated) > _MAX_UNAUTHENTICATED:
            self._dismiss_oldest()

    def _dismiss_oldest(self) -> None:
        if self._unauthenticated:
            oldest = next(iter(self._unauthenticated))
            del self._unauthenticated[oldest]
            self._connections[oldest].cancel()

    async def _handle(self, connection: socket.socket) -> None:
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                handler = await self._authenticate(connection)
            self._unauthenticated.pop(connection, None)
            await handler(connection)
        except (OSError, EOFError) as error:  # the peer has left or is not raysgd
            logger.debug("A connection has ended: %r", error)
        except Exception:
            logger.warning("A connection was closed because of an error.", exc_info=True)
        finally:
            self._unauthenticated.pop(connection, None)
            del self._connections[connection]
            shut_down(connection)
            connection.close()

    async def _authenticate(self, connection: socket.socket) -> Handler:
        """Authenticate the peer, and return the handler of its messages."""
        keep_alive(connection)
        if await receive_exactly(connection, len(_MAGIC)) != _MAGIC:
            raise ConnectionAbortedError("the peer uses another protocol")
        hello = await receive_exactly(connection, _NAME_BYTES + _RANDOM_BYTES)
        name, theirs = hello[:_NAME_BYTES], hello[_NAME_BYTES:]
        if (expectation := self._expected.get(name)) is None:
            raise ConnectionAbortedError("the peer names an unknown key")
        key, handler = expectation
        mine = secrets.token_bytes(_RANDOM_BYTES)
        await self._loop.sock_sendall(connection, mine + _proof(key, b"listening", mine, theirs))
        expected = _proof(key, b"connecting", mine, theirs)
        if not hmac.compare_digest(await receive_exactly(connection, _PROOF_BYTES), expected):
            raise ConnectionAbortedError("the peer does not know the key")
        if name not in self._expected:
            raise ConnectionAbortedError("the peer connected after forget()")
        return handler
