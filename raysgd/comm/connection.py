"""Connections of raysgd's processes to each other: who may connect, what a message is.

One process listens with a `Listener`, and others `connect` to an `Address` of which they were told
through Ray or through another connection. Both ends prove that they know its key before either
reads a message: each answers the other's random bytes by their HMAC (RFC 2104, with SHA-256), so
that the key itself never travels::

    connecting                               listening
    "sgd2", name (16), random bytes (32) ─▶
                                         ◀─  random bytes (32), proof (32)
    proof (32)                           ─▶
    messages                            ◀─▶  messages

Until then no more than these bytes are read of anybody, for `_HANDSHAKE_S` seconds at most, and
nobody is kept waiting by another. What follows is neither encrypted nor signed. A message is its
length, eight bytes with the highest first, and its content.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from typing import BinaryIO, NamedTuple

from raysgd.comm.sockets import shut_down

__all__ = [
    "Address",
    "Listener",
    "connect",
    "derived_key",
    "exactly",
    "framed",
    "read",
    "receive",
    "send",
]

logger = logging.getLogger(__name__)

Talk = Callable[[socket.socket], Awaitable[None]]

_LENGTH = struct.Struct("!Q")
_MAGIC = b"sgd2"
"""So that a client of another protocol, which may send less than a hello, is sent away at once."""
_NAME_BYTES = 16
_RANDOM_BYTES = 32
_PROOF_BYTES = 32
_HANDSHAKE_S = 60.0
"""As long as who connects may be willing to wait: a process may be busy, at either end."""
_MOST_STRANGERS = 256
"""How many connections may be in their handshake. With a further one the oldest is closed."""
_RETRY_S = 0.5
"""How long to accept nobody where that failed."""
_CLOSE_S = 5.0
_READ_BYTES = 1 << 20
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}
"""When the kernel asks after the host of a silent connection (seconds, seconds, how often), and how
long what is sent may stay unconfirmed (milliseconds): it is broken after 60 s in both cases."""


class Address(NamedTuple):
    """Where a process listens, and the key that both ends prove to know."""

    host: str
    port: int
    key: str


def derived_key(key: str, purpose: str) -> str:
    """Return a key for another purpose, for all who know `key`."""
    return hmac.digest(key.encode(), b"key for " + purpose.encode(), "sha256").hex()


def _name(key: str) -> bytes:
    """Return what tells the listener which key is meant; it is no secret."""
    return hmac.digest(key.encode(), b"name", "sha256")[:_NAME_BYTES]


def _proof(key: str, role: bytes, listening: bytes, connecting: bytes) -> bytes:
    return hmac.digest(key.encode(), role + listening + connecting, "sha256")


def connect(
    address: Address,
    timeout_s: float,
    reach_s: float = 5.0,
    hold: Callable[[socket.socket], None] | None = None,
) -> socket.socket:
    """Connect to a listener; returns a blocking socket on which messages may follow.

    Args:
        address: where it listens.
        timeout_s: for all of it. A process that is busy may take its time.
        reach_s: for the part that its host's kernel does.
        hold: called with the socket just before it is used, for another thread to shut it down;
            where that comes before the first packet is sent it has no effect.

    Raises:
        OSError: if nobody listens there, or does not know the key, or does not answer in time.
    """
    ends = time.monotonic() + timeout_s
    connection = socket.socket()
    try:
        if hold is not None:
            hold(connection)
        connection.settimeout(max(min(reach_s, timeout_s), 1e-3))
        connection.connect((address.host, address.port))
        _keep_alive(connection)
        mine = secrets.token_bytes(_RANDOM_BYTES)
        connection.sendall(_MAGIC + _name(address.key) + mine)
        answer = b""
        while len(answer) < _RANDOM_BYTES + _PROOF_BYTES:
            connection.settimeout(max(ends - time.monotonic(), 1e-3))
            part = connection.recv(_RANDOM_BYTES + _PROOF_BYTES - len(answer))
            if not part:
                raise ConnectionAbortedError("closed by what listens there")
            answer += part
        theirs, proof = answer[:_RANDOM_BYTES], answer[_RANDOM_BYTES:]
        if not hmac.compare_digest(proof, _proof(address.key, b"listening", theirs, mine)):
            raise ConnectionAbortedError("what listens there does not know the key")
        connection.sendall(_proof(address.key, b"connecting", theirs, mine))
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def _keep_alive(connection: socket.socket) -> None:
    """Send what is small at once, and let the kernel notice when the other host is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        if hasattr(socket, option):  # Linux has them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


# ---- messages


def framed(content: bytes) -> bytes:
    """Return a message as it is sent."""
    return _LENGTH.pack(len(content)) + content


def read(stream: BinaryIO) -> bytes:
    """Return the content of the next message of a blocking stream.

    Raises:
        EOFError: if the connection has ended, within a message or before.
        OSError: if it broke.
    """
    header = stream.read(_LENGTH.size)
    if len(header) == _LENGTH.size:
        (length,) = _LENGTH.unpack(header)
        content = stream.read(length)
        if len(content) == length:
            return content
    raise EOFError("the connection was closed")


async def receive(connection: socket.socket) -> bytes:
    """Return the content of the next message, in the thread of a listener; raises as `read`."""
    (length,) = _LENGTH.unpack(await exactly(connection, _LENGTH.size))
    return await exactly(connection, length)


async def send(connection: socket.socket, content: bytes) -> None:
    """Send a message in the thread of a listener."""
    await asyncio.get_running_loop().sock_sendall(connection, framed(content))


async def exactly(connection: socket.socket, length: int) -> bytes:
    """Return so many bytes."""
    loop, parts = asyncio.get_running_loop(), []
    while length:
        part = await loop.sock_recv(connection, min(length, _READ_BYTES))
        if not part:
            raise EOFError("the connection was closed")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


# ---- listening


class Listener:
    """Listens on a free port of `host`, in a thread of its own that ends with this object.

    It cannot end before `close` where an expected `talk` refers to this object.

    Args:
        host: IPv4 address.
        name: of the thread.

    Raises:
        OSError: if nothing can listen there.
        RuntimeError: if there can be no further thread.
    """

    def __init__(self, host: str, name: str) -> None:
        self._host = host
        # what the thread works on does not refer to this object, which would never be collected
        self._service = _Service(host, name)
        self._port: int = self._service.server.getsockname()[1]
        self._end = weakref.finalize(self, self._service.end)
        self._service.start()

    def expect(self, talk: Talk, key: str | None = None) -> Address:
        """Return an address for those who may connect.

        Args:
            talk: coroutine function that is run in the listener's thread with each connection,
                which is closed when it returns. It may ``detach`` the socket to keep it.
            key: what they prove to know; None: a new one.
        """
        key = secrets.token_hex(_RANDOM_BYTES) if key is None else key
        self._service.expected[_name(key)] = key, talk
        return Address(self._host, self._port, key)

    def forget(self, address: Address) -> None:
        """Refuse further connections to this address."""
        self._service.expected.pop(_name(address.key), None)

    def close(self) -> None:
        """Stop listening and end all connections; waits for that, but in its own thread."""
        self._end()
        if self._service.thread is not threading.current_thread():
            self._service.thread.join(_CLOSE_S)


class _Service:
    """What the thread of a listener works on."""

    def __init__(self, host: str, name: str) -> None:
        self.server = socket.create_server((host, 0), backlog=1024)
        self.server.setblocking(False)
        self.expected: dict[bytes, tuple[str, Talk]] = {}
        self._connections: dict[socket.socket, asyncio.Task[None]] = {}
        self._strangers: dict[socket.socket, None] = {}
        self._closed = asyncio.Event()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            # not the program's own kind of loop: sockets are taken out of it
            self._loop = asyncio.SelectorEventLoop()
        except OSError:
            self.server.close()
            raise

    def start(self) -> None:
        """Start the thread; where there can be none, nothing is left."""
        try:
            self.thread.start()
        except RuntimeError:
            self._loop.close()
            self.server.close()
            raise

    def end(self) -> None:
        """Let the thread end; called from any thread, and waits for nothing."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._closed.set)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        finally:
            # a task that is cancelled before its first step does not even close its connection,
            # and the other end would wait on
            for opened in (self.server, *self._connections):
                shut_down(opened)
                opened.close()

    async def _serve(self) -> None:
        self._listen()
        await self._closed.wait()
        self._loop.remove_reader(self.server)

    def _listen(self) -> None:
        if not self._closed.is_set():
            self._loop.add_reader(self.server, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self.server.accept()
        except (BlockingIOError, ConnectionAbortedError):  # whoever it was has gone
            return
        except OSError:  # no descriptor is left, most likely
            self._dismiss_oldest()
            self._loop.remove_reader(self.server)
            self._loop.call_later(_RETRY_S, self._listen)
            return
        connection.setblocking(False)
        self._strangers[connection] = None
        self._connections[connection] = self._loop.create_task(self._talk(connection))
        if len(self._strangers) > _MOST_STRANGERS:
            self._dismiss_oldest()

    def _dismiss_oldest(self) -> None:
        """End the handshake that takes longest, if there is one."""
        if self._strangers:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            self._connections[oldest].cancel()

    async def _talk(self, connection: socket.socket) -> None:
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                talk = await self._greet(connection)
            self._strangers.pop(connection, None)
            await talk(connection)
        except (OSError, EOFError) as error:  # the other end has gone, or is none of ours
            logger.debug("A connection has ended: %r", error)
        except Exception:
            logger.warning("A connection was closed because of an error.", exc_info=True)
        finally:
            self._strangers.pop(connection, None)
            del self._connections[connection]
            shut_down(connection)
            connection.close()

    async def _greet(self, connection: socket.socket) -> Talk:
        """Prove to know the key and have it proved; returns what those are to talk about."""
        _keep_alive(connection)
        if await exactly(connection, len(_MAGIC)) != _MAGIC:
            raise ConnectionAbortedError("it speaks another language")
        hello = await exactly(connection, _NAME_BYTES + _RANDOM_BYTES)
        name, theirs = hello[:_NAME_BYTES], hello[_NAME_BYTES:]
        if (found := self.expected.get(name)) is None:
            raise ConnectionAbortedError("it names no key of ours")
        key, talk = found
        mine = secrets.token_bytes(_RANDOM_BYTES)
        proof = _proof(key, b"listening", mine, theirs)
        await self._loop.sock_sendall(connection, mine + proof)
        expected = _proof(key, b"connecting", mine, theirs)
        if not hmac.compare_digest(await exactly(connection, _PROOF_BYTES), expected):
            raise ConnectionAbortedError("it does not know the key")
        if name not in self.expected:
            raise ConnectionAbortedError("it is not expected any more")
        return talk
