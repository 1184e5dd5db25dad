"""Channels: connections of the driver to workers, for calls that are made again and again.

A call of a Ray actor costs the two processes some 1.5 ms of processor time together; by a channel
it is a quarter of that. A worker serves a channel in its work thread, in a call of Ray's that lasts
until the driver hangs up. So all that user code does stays in that thread, calls by Ray wait until
the channel is let go of, and it is still Ray that tells of a worker's death: by the end of that
call.

The worker connects, to an address of which it was told through Ray. However a connection ends, no
request is carried out twice, and none is lost for which somebody waits: as the call of Ray's ends,
it returns the number of the newest request that was carried out, with its answer. If there was a
later one, it goes by Ray.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, BinaryIO, NamedTuple

from raysgd.comm.connection import Address, Listener, connect, framed, read, receive
from raysgd.comm.sockets import shut_down

__all__ = ["Channel", "Channels", "Requests", "Served"]

logger = logging.getLogger(__name__)

_CONNECT_S = 30.0
"""How long a driver that is busy may take to let a worker connect."""


class Served(NamedTuple):
    """The newest request that a worker has carried out, and what came of it."""

    number: int
    """From 1; 0 where the driver could not be reached, and the answer says why."""
    answer: Any


class Channel:
    """The driver's end of one channel. It carries one request at a time.

    Args:
        listener: at which the worker is to connect.
        on_end: called when the worker serves it no more, with why it could not connect if that
            is the reason.
    """

    def __init__(self, listener: Listener, on_end: Callable[[Address, str | None], None]) -> None:
        self.address = listener.expect(self._talk, once=True)
        self._on_end = weakref.WeakMethod(on_end)
        # held for assignments and a system call alone: a garbage collection in there might end
        # another trainer, which waits for the thread of Ray's that may be waiting in `end`
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._hung_up = False
        self._number = 0
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
        with self._lock:
            self._hung_up = True
            self._unsent += _FAREWELL
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

    async def _talk(self, connection: socket.socket) -> None:
        """Receive the answers of the worker, which has connected."""
        with self._lock:
            self._socket = connection
            self._send()
        try:
            while True:
                self.take(Served(*pickle.loads(await receive(connection))))
        finally:
            with self._lock:
                self._socket = None

    def take(self, served: Served) -> None:
        """Take what the worker has carried out, unless it is known already."""
        with self._lock:
            if self._asked is None or served.number != self._number:
                return
            (future, _), self._asked = self._asked, None
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
        future, _ = asked
        if error is None:
            # not here: this is a thread of Ray's, which is not to wait for Ray
            passing = threading.Thread(target=_pass_on, args=asked, daemon=True)
            try:
                passing.start()
            except RuntimeError as no_thread:
                error = no_thread
        if error is not None:
            future.set_exception(error)


def _pass_on(asked: Future[Any], otherwise: Callable[[], Future[Any]]) -> None:
    try:
        asked.set_result(otherwise().result())
    except BaseException as error:
        asked.set_exception(error)


class Channels:
    """The driver's ends of all channels of a group."""

    def __init__(self) -> None:
        self.usable = os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true")
        """False where a worker could not connect, and where all is to be encrypted."""
        self._changed = threading.RLock()  # a signal handler may close them
        self._listeners: dict[str, Listener] = {}

    def open(self, host: str) -> Channel:
        """Return a channel that a worker may connect to.

        Args:
            host: address of this machine at which the worker reaches it.

        Raises:
            OSError: if nothing can listen there.
            RuntimeError: if there can be no further thread.
        """
        with self._changed:
            return Channel(self.listener(host), self._ended)

    def listener(self, host: str) -> Listener:
        """Return what listens at this address, for channels and for pulses; raises as `open`."""
        with self._changed:
            if host not in self._listeners:
                self._listeners[host] = Listener(host, "raysgd-channels")
            return self._listeners[host]

    def close(self) -> None:
        """Break all connections and stop listening. Channels that are opened later start anew."""
        with self._changed:
            listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.close()

    def _ended(self, address: Address, why_not: str | None) -> None:
        listener = self._listeners.get(address.host)
        if listener is None or not listener.forget(address) or why_not is None:
            return
        if listener.has_failed:
            return  # it was this end that did not let it
        if self.usable:
            self.usable = False
            logger.warning(
                "A worker cannot connect to the driver at %s:%d (%s). All calls go through Ray "
                "now, which takes a millisecond more.",
                address.host,
                address.port,
                why_not,
            )


class Requests:
    """The worker's end of one channel: what the driver asks for, until it hangs up.

    Args:
        address: where the driver listens.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._number = 0
        self.served = Served(0, None)
        """The newest request that was carried out, and its answer, which the driver may have."""

    def __iter__(self) -> Iterator[Any]:
        """Go through the requests. Each is to be answered before the next."""
        try:
            self._connection = connect(self._address, _CONNECT_S)
        except OSError as error:
            self.served = Served(0, str(error))
            return
        with self._connection, self._connection.makefile("rb") as stream:
            while (message := _next(stream)) is not None:
                self._number, request = message
                yield request
            shut_down(self._connection)

    def answer(self, answer: Any) -> None:
        """Send the answer of the request under way, which has been carried out."""
        self.served = Served(self._number, answer)
        with contextlib.suppress(OSError):  # it is broken, as the next reading will show
            self._connection.sendall(_frame(tuple(self.served)))


def _next(stream: BinaryIO) -> Any:
    """Return the next message; None where the connection has ended, or the driver hangs up."""
    try:
        return pickle.loads(read(stream))
    except (OSError, EOFError):
        return None


def _frame(value: Any) -> bytes:
    return framed(pickle.dumps(value, protocol=5))


_FAREWELL = _frame(None)
