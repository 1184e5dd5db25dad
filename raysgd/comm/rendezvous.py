"""The store through which the workers of one generation find each other: server and client.

torch's own TCPStore does the same, and cannot be relied on where a generation may be given up at
any moment: its client first asks the name server for the name of the address that it connects to,
which costs seconds where that does not answer; it goes on trying a store that was closed until its
time is over; and its waits cannot be ended from outside. Here a wait ends when the driver closes
the store, and when the client is interrupted.

A request is a line with a JSON array, the operation and its arguments, and so is the answer, with
one element. The first request proves that the client was told of the store by the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from raysgd.comm.sockets import shut_down

__all__ = ["StoreAddress", "StoreClient", "StoreServer"]

_CONNECT_S = 10.0
_ANSWER_S = 60.0
"""How long an answer may take beyond what the request itself may wait for."""
_CLOSE_S = 5.0
_RETRY_S = 1.0
"""How long to accept nobody where that failed."""
_READ_BYTES = 2**16
_MOST_BYTES = 2**26
"""The longest line."""


class StoreAddress(NamedTuple):
    """Where a store listens, and what shows it that a client is a worker."""

    host: str
    port: int
    token: str


class StoreServer:
    """Keeps the keys of one generation in a thread of its own, on a free port of `host`."""

    def __init__(self, host: str) -> None:
        self._values: dict[str, str] = {}
        self._there: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._listener = socket.create_server((host, 0), backlog=1024)
        self._listener.setblocking(False)
        port: int = self._listener.getsockname()[1]
        self.address = StoreAddress(host, port, secrets.token_hex())
        self._talks: dict[socket.socket, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._closed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="raysgd-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections, and with them the waits of the clients."""
        with contextlib.suppress(RuntimeError):  # it is closed already
            self._loop.call_soon_threadsafe(self._closed.set)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        finally:
            # A task that is cancelled before its first step does not even close its connection,
            # and neither do the servers and streams of asyncio: a client would wait on.
            for opened in (self._listener, *self._talks):
                shut_down(opened)
                opened.close()

    async def _serve(self) -> None:
        self._listen()
        await self._closed.wait()
        self._loop.remove_reader(self._listener)

    def _listen(self) -> None:
        if not self._closed.is_set():
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # whoever it was has gone
            return
        except OSError:  # no descriptor is left, most likely
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_RETRY_S, self._listen)
            return
        self._talks[connection] = self._loop.create_task(self._talk(connection))

    async def _talk(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            held = bytearray()
            if await self._request(connection, held) != ["hello", self.address.token]:
                return
            answer: Any = True
            while True:
                await self._loop.sock_sendall(connection, _line([answer]))
                await asyncio.sleep(0)  # for the others: what can be read and sent at once is
                operation, *arguments = await self._request(connection, held)
                answer = self._do[operation](*arguments)
                if asyncio.iscoroutine(answer):
                    answer = await answer
        except (ValueError, LookupError, TypeError, OSError, EOFError):
            pass  # the client has gone, or is none of ours
        finally:
            del self._talks[connection]
            shut_down(connection)
            connection.close()

    async def _request(self, connection: socket.socket, held: bytearray) -> Any:
        """Return the next request; `held` is what has been read of it and of what follows."""
        end = held.find(b"\n")
        while end < 0:
            read = await self._loop.sock_recv(connection, _READ_BYTES)
            length = len(held)
            held += read
            # a client of torch's TCPStore, led here by MASTER_PORT, would never end a line
            if not read or held[0] != b"["[0] or length > _MOST_BYTES:
                raise EOFError
            end = held.find(b"\n", length)
        request = json.loads(held[: end + 1])
        del held[: end + 1]
        return request

    @property
    def _do(self) -> dict[str, Callable[..., Any]]:
        values = self._values
        return {
            "get": self._get,
            "set": self._set,
            "append": lambda key, value: self._set([key], [values.get(key, "") + value]),
            "add": self._add,
            "check": lambda keys: all(key in values for key in keys),
            "compare_set": self._compare_set,
            "delete": self._delete,
            "num_keys": lambda: len(values),
        }

    async def _get(self, keys: Sequence[str], timeout_s: float) -> list[str] | None:
        """Return the values when all are there; None if they are not in time."""
        try:
            async with asyncio.timeout(timeout_s):
                for key in keys:
                    await self._there[key].wait()
        except TimeoutError:
            return None
        return [self._values[key] for key in keys]

    def _set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self._values[key] = value
            self._there[key].set()

    def _add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, "0")) + amount
        self._set([key], [str(total)])
        return total

    def _compare_set(self, key: str, expected: str, desired: str) -> str:
        found = self._values.get(key)
        if found == expected or (found is None and not expected):
            self._set([key], [desired])
            return desired
        return expected if found is None else found

    def _delete(self, key: str) -> bool:
        self._there[key].clear()
        return self._values.pop(key, None) is not None


class StoreClient:
    """A worker's connection to a store.

    Every method raises ConnectionError once the store is closed or the client interrupted.

    Args:
        address: where the store listens.

    Raises:
        ConnectionError: if the store cannot be reached.
    """

    def __init__(self, address: StoreAddress) -> None:
        self._name = f"The driver's store at {address.host}:{address.port}"
        self._lock = threading.Lock()
        try:
            self._socket = socket.create_connection((address.host, address.port), _CONNECT_S)
        except OSError as error:
            raise ConnectionError(
                f"{self._name} cannot be reached ({error}): this generation of workers was given "
                "up, or a firewall is in between."
            ) from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers = self._socket.makefile("rb")
        weakref.finalize(self, _close, self._socket, self._answers)
        self.ask("hello", address.token)

    def interrupt(self) -> None:
        """End the wait that another thread is in, and refuse all later ones."""
        shut_down(self._socket)

    def set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        """Set keys."""
        self.ask("set", list(keys), list(values))

    def get(self, keys: Sequence[str], timeout_s: float) -> list[str]:
        """Return the values of keys, once all are there.

        Raises:
            TimeoutError: if they are not within `timeout_s` seconds.
        """
        values: list[str] | None = self.ask("get", list(keys), timeout_s, wait_s=timeout_s)
        if values is None:
            raise TimeoutError(
                f"Waited {timeout_s:g} s, in vain, for other workers to set {', '.join(keys)}."
            )
        return values

    def ask(self, operation: str, *arguments: Any, wait_s: float = 0.0) -> Any:
        """Return the answer to a request; `wait_s` is how long the server may wait with it."""
        cause: OSError | None = None
        try:
            with self._lock:
                self._socket.settimeout(wait_s + _ANSWER_S)
                self._socket.sendall(_line([operation, *arguments]))
                answer = self._answers.readline()
        except TimeoutError as error:
            raise ConnectionError(
                f"{self._name} did not answer for {wait_s + _ANSWER_S:g} s."
            ) from error
        except OSError as error:
            answer, cause = b"", error
        if not answer.endswith(b"\n"):
            raise ConnectionError(
                f"{self._name} is closed: this generation of workers was given up."
            ) from cause
        return json.loads(answer)[0]


def _close(*opened: Any) -> None:
    for file in opened:
        file.close()


def _line(values: list[Any]) -> bytes:
    return json.dumps(values).encode() + b"\n"
