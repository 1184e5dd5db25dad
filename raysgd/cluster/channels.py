"""Channels: connections of the driver to workers, for calls that are made again and again.

A call of a Ray actor costs the two processes some 1.5 ms of processor time together; by a channel
it is a quarter of that. A worker serves a channel in its work thread, in a call of Ray's that lasts
until the driver hangs up. So all that user code does stays in that thread, calls by Ray wait until
the channel is let go of, and it is still Ray that tells of a worker's death: by the end of that
call.

The worker connects and shows, by a token of which it was told through Ray, that it is the one; the
driver greets it with a byte. Requests and answers are frames: a length of eight bytes and a pickle.
However a connection ends, no request is carried out twice, and none is lost for which somebody
waits: as the call of Ray's ends, it returns the number of the newest request that was carried out,
with its answer. If there was a later one, it goes by Ray.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, BinaryIO, NamedTuple

from raysgd.comm.sockets import shut_down

__all__ = ["Channel", "ChannelAddress", "Channels", "Served", "serve"]

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("!Q")
_TOKEN_BYTES = 32
_GREETING = b"!"
_READ_BYTES = 1 << 16
_CONNECT_S = 5.0
_GREET_S = 30.0
"""How long a worker waits to be greeted, and a connection may stay that has shown no token."""
_DEAD_S = 60
"""After how long a connection counts as broken whose other end does not confirm what it gets."""
_CLOSE_S = 5.0


class ChannelAddress(NamedTuple):
    """Where the driver listens, and what shows it which worker it is that connects."""

    host: str
    port: int
    token: bytes


class Served(NamedTuple):
    """The newest request that a worker has carried out, and what came of it."""

    number: int
    """From 1; 0 where the driver could not be reached, and the answer says why."""
    answer: Any


class Channel:
    """The driver's end of one channel. It carries one request at a time.

    Args:
        address: where the worker is to connect to.
        on_end: called when the worker serves it no more, with why it could not connect if that
            is the reason.
    """

    def __init__(
        self, address: ChannelAddress, on_end: Callable[[ChannelAddress, str | None], None]
    ) -> None:
        self.address = address
        self._on_end = weakref.WeakMethod(on_end)
        # held for assignments and a system call alone: a garbage collection in there might end
        # another trainer, which waits for the thread of Ray's that may be waiting in `end`
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._hung_up = False
        self._number = 0
        self._num_answered = 0
        self._asked: tuple[Future[Any], Callable[[], Future[Any]]] | None = None
        self._unsent = b""

    def ask(self, request: Any, otherwise: Callable[[], Future[Any]]) -> Future[Any] | None:
        """Send a request; returns the future of its answer, or None if it takes none now.

        Args:
            request: what the worker is to do. It is pickled.
            otherwise: does the same by Ray. Called, in a thread of its own, if the worker lets go
                of the channel and has not carried the request out.
        """
        future: Future[Any] = Future()
        asked, number = (future, otherwise), self._number + 1
        frame = _frame((number, request))
        with self._lock:
            if self._asked is not None or self._hung_up:
                return None
            self._number, self._asked, self._unsent = number, asked, frame
            self._send()
        return future

    def hang_up(self) -> None:
        """Let the worker's thread go, once the request under way is carried out.

        It may be said again, where it is uncertain that it was.
        """
        farewell = _frame((self._num_answered, None))
        with self._lock:
            self._hung_up = True
            self._unsent += farewell
            self._send()

    def _send(self) -> None:
        """Send what there is to say, if the worker is there already."""
        if self._socket is None or not self._unsent:
            return
        # KeyboardInterrupt may hit here: dropping a request is safe, sending it twice is not
        unsent, self._unsent = self._unsent, b""
        try:
            if self._socket.send(unsent) < len(unsent):
                raise BlockingIOError  # the worker is stopped, say; Ray has the patience for it
        except OSError:
            shut_down(self._socket)

    def connect(self, connection: socket.socket) -> None:
        """Take over the worker's connection."""
        with self._lock:
            self._socket = connection
            self._unsent = _GREETING + self._unsent
            self._send()

    def disconnect(self) -> None:
        """Let go of the connection, which is to be closed."""
        with self._lock:
            self._socket = None

    def take(self, served: Served) -> None:
        """Take what the worker has carried out, unless it is known already."""
        with self._lock:
            if self._asked is None or served.number != self._number:
                return
            (future, _), self._asked = self._asked, None
            self._num_answered = served.number
        future.set_result(served.answer)

    def end(self, call: Future[Served]) -> None:
        """Take the end of Ray's call in which the worker served the channel."""
        error = call.exception()
        served = None if error is not None else call.result()
        if served is not None:
            self.take(served)
        with self._lock:
            self._hung_up = True
            asked, self._asked = self._asked, None
        if (on_end := self._on_end()) is not None:
            on_end(self.address, served.answer if served and served.number == 0 else None)
        if asked is None:
            return
        future, otherwise = asked
        if error is None:
            # not here: this is a thread of Ray's, which is not to wait for Ray
            passing = threading.Thread(target=_pass_on, args=(otherwise, future), daemon=True)
            try:
                passing.start()
            except RuntimeError as no_thread:
                error = no_thread
        if error is not None:
            future.set_exception(error)


def _pass_on(otherwise: Callable[[], Future[Any]], asked: Future[Any]) -> None:
    def settle(future: Future[Any]) -> None:
        error = future.exception()
        if error is None:
            asked.set_result(future.result())
        else:
            asked.set_exception(error)

    try:
        otherwise().add_done_callback(settle)
    except Exception as error:  # Ray was shut down, most likely
        asked.set_exception(error)


class Channels:
    """The driver's ends of all channels of a group, and the thread that reads them."""

    def __init__(self) -> None:
        self.usable = os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true")
        """False where a worker could not connect, and where all is to be encrypted."""
        self._changed = threading.Lock()
        self._reader: _Reader | None = None
        self._listeners: dict[str, _Listener] = {}
        self._awaited: dict[bytes, Channel] = {}

    def open(self, host: str) -> Channel:
        """Return a channel that a worker may connect to.

        Args:
            host: address of this machine at which the worker reaches it.

        Raises:
            OSError: if nothing can listen there.
            RuntimeError: if there can be no further thread.
        """
        with self._changed:
            if self._reader is None:
                self._reader = _Reader(self._greeted)
            listener = self._listeners.get(host)
            if listener is None or listener.failed:
                listener = self._listeners[host] = self._reader.listen(host)
            token = secrets.token_bytes(_TOKEN_BYTES)
            address = ChannelAddress(host, listener.port, token)
            channel = self._awaited[token] = Channel(address, self._ended)
        return channel

    def close(self) -> None:
        """Break all connections and stop listening. Channels that are opened later start anew."""
        with self._changed:
            self._listeners, self._awaited = {}, {}
            if self._reader is not None:
                self._reader.close()
            self._reader = None

    def _greeted(self, token: bytes) -> Channel | None:
        """Return the channel that a worker has connected for; None for one that is none of ours."""
        return self._awaited.pop(token, None)

    def _ended(self, address: ChannelAddress, why_not: str | None) -> None:
        awaited = self._awaited.pop(address.token, None) is not None
        listener = self._listeners.get(address.host)
        if why_not is None or not awaited or listener is None or listener.failed:
            return  # or it was this end that did not let it
        if self.usable:
            self.usable = False
            logger.warning(
                "A worker cannot connect to the driver at %s:%d (%s). All calls go through Ray "
                "now, which takes a millisecond more.",
                address.host,
                address.port,
                why_not,
            )


class _Reader:
    """A thread that accepts connections and reads them.

    The thread does not refer to this object, and ends with it at the latest.
    """

    def __init__(self, greeted: Callable[[bytes], Channel | None]) -> None:
        self._greeted = weakref.WeakMethod(greeted)
        self._selector = selectors.DefaultSelector()
        waker, woken = socket.socketpair()
        self._wake = weakref.finalize(self, _wake, waker, os.getpid())
        self._selector.register(woken, selectors.EVENT_READ)
        self._thread = threading.Thread(
            target=_read, args=(self._selector,), name="raysgd-channels", daemon=True
        )
        self._thread.start()

    def listen(self, host: str) -> _Listener:
        """Listen at a free port of this host."""
        server = socket.create_server((host, 0), backlog=1024)
        server.setblocking(False)
        listener = _Listener(self._greeted, server.getsockname()[1])
        self._selector.register(server, selectors.EVENT_READ, listener)
        return listener

    def close(self) -> None:
        """Close all there is, and end the thread."""
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)


def _wake(waker: socket.socket, pid: int) -> None:
    if os.getpid() == pid:  # the end of a process that was forked is none of ours
        with contextlib.suppress(OSError):
            waker.send(b"!")  # to close it would not do: such a process may have it, too
    waker.close()


def _read(selector: selectors.BaseSelector) -> None:
    """Read what comes until the waker is heard; then close all there is."""
    while all([_hear(selector, key) for key, _ in selector.select()]):
        pass
    for key in list(selector.get_map().values()):
        _end(selector, key)
    selector.close()


def _hear(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> bool:
    if key.data is None:  # the waker
        return False
    try:
        key.data(key.fileobj, selector)
    except Exception as error:
        # the end of a connection, most likely. It is the worker's end that counts
        logger.debug("A connection to a worker has ended: %r", error)
        _end(selector, key)
    return True


def _end(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    assert isinstance(key.fileobj, socket.socket)
    if isinstance(key.data, _Reading) and key.data.channel is not None:
        key.data.channel.disconnect()
    with contextlib.suppress(KeyError, ValueError):  # it may have been ended a moment ago
        selector.unregister(key.fileobj)
    shut_down(key.fileobj)
    key.fileobj.close()


def _watch_over(connection: socket.socket) -> None:
    """Send what is small at once, and notice when the other machine or the way to it is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in {
        "TCP_KEEPIDLE": _DEAD_S // 2,
        "TCP_KEEPINTVL": _DEAD_S // 6,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": 1000 * _DEAD_S,
    }.items():
        if hasattr(socket, option):  # Linux has them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


_Greeted = weakref.WeakMethod[Callable[[bytes], Channel | None]]


class _Listener:
    """Takes what connects to one address."""

    def __init__(self, greeted: _Greeted, port: int) -> None:
        self.port = port
        self.failed = False
        """Whether it can take nothing any more; what has tried to connect is refused then."""
        self._greeted = greeted
        self._silent: list[tuple[_Reading, socket.socket]] = []

    def __call__(self, server: socket.socket, selector: selectors.BaseSelector) -> None:
        """Accept a connection, and close those that have shown no token in their time."""
        try:
            connection, _ = server.accept()
        except (BlockingIOError, ConnectionAbortedError):  # whoever it was has gone
            return
        except OSError:  # no descriptor is left, most likely
            self.failed = True
            raise
        try:
            connection.setblocking(False)
            _watch_over(connection)
        except OSError:
            connection.close()
            return
        self._silent = [(r, c) for r, c in self._silent if r.channel is None and c.fileno() >= 0]
        for reading, silent in self._silent:
            if reading.is_overdue:
                _end(selector, selector.get_key(silent))
        reading = _Reading(self._greeted)
        self._silent.append((reading, connection))
        selector.register(connection, selectors.EVENT_READ, reading)


class _Reading:
    """What was read from one connection."""

    def __init__(self, greeted: _Greeted) -> None:
        self._greeted = greeted
        self.channel: Channel | None = None
        self._held = bytearray()
        self._began = time.monotonic()

    @property
    def is_overdue(self) -> bool:
        """Whether it should have shown a token by now."""
        return self.channel is None and time.monotonic() > self._began + _GREET_S

    def __call__(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        """Read what there is, and hand on what is complete."""
        data = connection.recv(_READ_BYTES)
        if not data:
            raise EOFError("it was closed")
        self._held += data
        if self.channel is None:
            if len(self._held) < _TOKEN_BYTES:
                return
            greeted = self._greeted()
            self.channel = None if greeted is None else greeted(self._take(_TOKEN_BYTES))
            if self.channel is None:
                raise ConnectionError("it is none of ours")
            self.channel.connect(connection)
        while len(self._held) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._held)
            if len(self._held) < _LENGTH.size + length:
                return
            self._take(_LENGTH.size)
            self.channel.take(Served(*pickle.loads(self._take(length))))

    def _take(self, length: int) -> bytes:
        taken = bytes(self._held[:length])
        del self._held[:length]
        return taken


def serve(address: ChannelAddress, carry_out: Callable[..., Any]) -> Served:
    """Carry out what comes by a channel, until the driver hangs up. Runs on a worker.

    Returns:
        The newest request that was carried out, and its answer unless the driver has it.
    """
    try:
        connection = socket.create_connection((address.host, address.port), _CONNECT_S)
    except OSError as error:
        return Served(0, str(error))
    served = Served(0, None)
    with connection, connection.makefile("rb") as stream:
        try:
            _watch_over(connection)
            connection.sendall(address.token)
            connection.settimeout(_GREET_S)
            if stream.read(1) != _GREETING:
                return Served(0, "the connection was closed")
            connection.settimeout(None)
        except OSError as error:
            return Served(0, str(error))
        while (frame := _received(stream)) is not None:
            number, request = pickle.loads(frame)
            if request is None:
                if served.number == number:
                    served = Served(number, None)
                break
            served = Served(number, carry_out(*request))
            with contextlib.suppress(OSError):  # it is broken, as the next reading will show
                connection.sendall(_frame(tuple(served)))
        shut_down(connection)
    return served


def _received(stream: BinaryIO) -> bytes | None:
    """Return the next frame's pickle; None where the connection has ended, within it or before."""
    try:
        header = stream.read(_LENGTH.size)
        if len(header) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack(header)
        data = stream.read(length)
    except OSError:
        return None
    return data if len(data) == length else None


def _frame(value: Any) -> bytes:
    data = pickle.dumps(value, protocol=5)
    return _LENGTH.pack(len(data)) + data
