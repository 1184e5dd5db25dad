"""Lines: connections of the driver to workers, for calls that are made again and again.

A call of a Ray actor costs the two processes some 1.5 ms of processor time together; by a line it
is a tenth of that. A worker serves a line in its work thread, in a call of Ray's that lasts until
the driver hangs up. So all that user code does stays in that thread, calls by Ray wait until the
line is let go of, and it is still Ray that tells of a worker's death: by the end of that call.

The worker connects, and shows by a token, of which it was told through Ray, that it is the one. A
request and its answer are frames: a length of eight bytes and a pickle. Whatever becomes of a
connection, a request is carried out once: as the call of Ray's ends, it returns the number of the
newest request that it has carried out, with the answer. What is not among these goes by Ray.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, BinaryIO, NamedTuple

__all__ = ["Line", "LineAddress", "Lines", "Served", "serve"]

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("!Q")
_TOKEN_BYTES = 32
_READ_BYTES = 1 << 16
_CONNECT_S = 5.0
_CLOSE_S = 5.0


class LineAddress(NamedTuple):
    """Where the driver listens, and what shows it which worker it is that connects."""

    host: str
    port: int
    token: bytes


class Served(NamedTuple):
    """The newest request that a worker has carried out, and what came of it."""

    number: int
    answer: Any


class Line:
    """The driver's end of one line. It carries one request at a time.

    Args:
        address: where the worker is to connect to.
        on_end: called when the worker serves it no more, with whether it had ever connected.
    """

    def __init__(self, address: LineAddress, on_end: Callable[[LineAddress, bool], None]) -> None:
        self.address = address
        self._on_end = on_end
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._has_connected = False
        self._hung_up = False
        self._number = 0
        self._asked: tuple[Future[Any], Callable[[], Future[Any]]] | None = None
        self._unsent = b""

    def ask(self, request: Any, otherwise: Callable[[], Future[Any]]) -> Future[Any] | None:
        """Send a request; returns the future of its answer, or None if it takes none now.

        Args:
            request: what the worker is to do. It is pickled.
            otherwise: does the same by Ray. Called, in a thread of its own, if the worker lets go
                of the line and has not carried the request out.
        """
        with self._lock:
            if self._asked is not None or self._hung_up:
                return None
            future: Future[Any] = Future()
            self._number += 1
            self._asked = future, otherwise
            self._unsent = _frame((self._number, request))
            self._send()
        return future

    def hang_up(self) -> None:
        """Let the worker's thread go, once the request under way is carried out."""
        with self._lock:
            self._hung_up = True
            self._send()

    def _send(self) -> None:
        """Send what there is to say, if the worker is there already."""
        if self._socket is None:
            return
        unsent, self._unsent = self._unsent, b""
        with contextlib.suppress(OSError):  # the end of the connection, which is heard of
            if self._socket.send(unsent) < len(unsent):
                # not read, since the worker is stopped, say: Ray has the patience for it
                self._socket.shutdown(socket.SHUT_RDWR)
            if self._hung_up:
                self._socket.shutdown(socket.SHUT_WR)

    def connect(self, connection: socket.socket) -> None:
        """Take over the worker's connection."""
        with self._lock:
            self._socket, self._has_connected = connection, True
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
        future.set_result(served.answer)

    def end(self, call: Future[Served | None]) -> None:
        """Take the end of Ray's call in which the worker served the line."""
        error = call.exception()
        served = None if error is not None else call.result()
        if served is not None:
            self.take(served)
        with self._lock:
            self._hung_up = True
            asked, self._asked = self._asked, None
        self._on_end(self.address, self._has_connected or error is not None)
        if asked is None:
            return
        future, otherwise = asked
        if error is not None:
            future.set_exception(error)
        else:  # not here: this is a thread of Ray's, which is not to wait for Ray
            threading.Thread(target=_pass_on, args=(otherwise, future), daemon=True).start()


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


class Lines:
    """The driver's ends of all lines of a group, and the thread that reads them."""

    def __init__(self) -> None:
        self.usable = True
        """False once a worker could not connect."""
        self._changed = threading.Lock()
        self._selector: selectors.BaseSelector | None = None
        self._thread: threading.Thread | None = None
        self._waker: socket.socket | None = None
        self._listeners: dict[str, socket.socket] = {}
        self._awaited: dict[bytes, Line] = {}

    def open(self, host: str) -> Line:
        """Return a line that a worker may connect to.

        Args:
            host: address of this machine at which the worker reaches it.

        Raises:
            OSError: if nothing can listen there.
        """
        with self._changed:
            if self._selector is None:
                self._start()
            listener = self._listeners.get(host)
            if listener is None:
                assert self._selector is not None
                listener = self._listeners[host] = socket.create_server((host, 0), backlog=1024)
                listener.setblocking(False)
                self._selector.register(listener, selectors.EVENT_READ, self._accept)
            token = secrets.token_bytes(_TOKEN_BYTES)
            address = LineAddress(host, listener.getsockname()[1], token)
            line = self._awaited[token] = Line(address, self._ended)
        return line

    def close(self) -> None:
        """Break all connections and stop listening. Lines that are opened later start anew."""
        with self._changed:
            thread, waker = self._thread, self._waker
            self._thread = self._waker = self._selector = None
            self._listeners, self._awaited = {}, {}
        if waker is not None and thread is not None:
            waker.close()  # which ends the thread
            thread.join(_CLOSE_S)

    def _start(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._waker, woken = socket.socketpair()
        self._selector.register(woken, selectors.EVENT_READ, None)
        self._thread = threading.Thread(
            target=_read, args=(self._selector,), name="raysgd-lines", daemon=True
        )
        self._thread.start()

    def _accept(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # whoever it was has gone
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(connection, selectors.EVENT_READ, _Reading(self._greeted))

    def _greeted(self, token: bytes) -> Line | None:
        """Return the line that a worker has connected for; None for one that is none of ours."""
        with self._changed:
            return self._awaited.pop(token, None)

    def _ended(self, address: LineAddress, was_reachable: bool) -> None:
        with self._changed:
            self._awaited.pop(address.token, None)
            if was_reachable or not self.usable:
                return
            self.usable = False
        logger.warning(
            "Workers cannot connect to the driver at %s:%d; a firewall may be in between. All "
            "calls go through Ray now, which takes a millisecond more.",
            address.host,
            address.port,
        )


def _read(selector: selectors.BaseSelector) -> None:
    """Read what comes until the waker is closed; then close all there is."""
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
        # the end of a connection, most likely; Ray will tell what has become of the worker
        logger.debug("A connection to a worker has ended: %r", error)
        _end(selector, key)
    return True


def _end(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    assert isinstance(key.fileobj, socket.socket)
    if isinstance(key.data, _Reading) and key.data.line is not None:
        key.data.line.disconnect()
    selector.unregister(key.fileobj)
    key.fileobj.close()


class _Reading:
    """What was read from one connection."""

    def __init__(self, greeted: Callable[[bytes], Line | None]) -> None:
        self._greeted = greeted
        self.line: Line | None = None
        self._held = bytearray()

    def __call__(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        """Read what there is, and hand on what is complete."""
        data = connection.recv(_READ_BYTES)
        if not data:
            raise EOFError("it was closed")
        self._held += data
        if self.line is None:
            if len(self._held) < _TOKEN_BYTES:
                return
            self.line = self._greeted(self._take(_TOKEN_BYTES))
            if self.line is None:
                raise ConnectionError("it is none of ours")
            self.line.connect(connection)
        while len(self._held) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._held)
            if len(self._held) < _LENGTH.size + length:
                return
            self._take(_LENGTH.size)
            self.line.take(Served(*pickle.loads(self._take(length))))

    def _take(self, length: int) -> bytes:
        taken = bytes(self._held[:length])
        del self._held[:length]
        return taken


def serve(address: LineAddress, carry_out: Callable[..., Any]) -> Served | None:
    """Carry out what comes by a line, until the driver hangs up. Runs on a worker.

    Returns:
        The newest request that was carried out, and its answer; None where there was none. Where
        the driver could not be reached, or the connection broke, it goes by this.
    """
    served: Served | None = None
    try:
        connection = socket.create_connection((address.host, address.port), _CONNECT_S)
    except OSError:
        return None
    with connection, connection.makefile("rb") as stream:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _tell(connection, address.token)
        while (frame := _received(stream)) is not None:
            number, request = pickle.loads(frame)
            served = Served(number, carry_out(*request))
            _tell(connection, _frame(tuple(served)))
    return served


def _tell(connection: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # it is broken, as the next reading will show
        connection.sendall(data)


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
