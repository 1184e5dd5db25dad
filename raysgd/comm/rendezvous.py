"""Server and client of the key-value store where the workers of one generation rendezvous.

A generation can end at any moment. The ``TCPStore`` of PyTorch retries a closed store until its
timeout, and its waits cannot be interrupted. With this store, a wait ends when the driver closes
the store or the client is interrupted.

A request is a pickled sequence: the operation and its arguments. An answer is a pickled value.
"""

import asyncio
import pickle
import socket
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from raysgd.comm.connection import Address, Listener, add_length, connect, read, receive, send
from raysgd.comm.network import shut_down

_CONNECT_S = 10.0
_ANSWER_S = 60.0  # seconds that an answer may take in addition to the `wait_s` of its request


class StoreServer:
    """Serves the keys of one generation."""

    def __init__(self, host: str) -> None:
        self._values: dict[str, Any] = {}
        self._set_events: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._operations = {"get": self._get, "set": self._set, "add": self._add}
        listener = Listener(host, "raysgd-store")
        self.address, self.close = listener.expect(self._answer), listener.close

    async def _answer(self, connection: socket.socket) -> None:
        while True:
            operation, *arguments = pickle.loads(await receive(connection))
            await send(connection, pickle.dumps(await self._operations[operation](*arguments)))
            await asyncio.sleep(0)  # let other tasks run: ready reads and writes do not yield

    async def _get(self, keys: Sequence[str], timeout_s: float) -> list[Any] | None:
        """Return the values when all keys are set, or None after a timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                for key in keys:
                    await self._set_events[key].wait()
        except TimeoutError:
            return None
        return [self._values[key] for key in keys]

    async def _set(self, key: str, value: Any) -> None:
        self._values[key] = value
        self._set_events[key].set()

    async def _add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        await self._set(key, str(total).encode())
        return total


class StoreClient:
    """Connection of a worker to a store.

    Methods raise `closed_error` if the store is unreachable or closed, or after `interrupt`. They
    raise `timeout_error` if a key is not set in time.
    """

    def __init__(
        self,
        address: Address,
        closed_error: type[Exception] = ConnectionError,
        timeout_error: type[Exception] = TimeoutError,
    ) -> None:
        self._closed_error, self._timeout_error = closed_error, timeout_error
        self._name = f"The driver's store at {address.host}:{address.port}"
        self._lock = threading.Lock()
        try:
            self._socket = connect(address, _ANSWER_S, _CONNECT_S)
        except OSError as error:
            raise self._closed_error(
                f"{self._name} cannot be reached ({error}). This generation of workers has ended, "
                "or a firewall blocks the port."
            ) from error
        self._answers = self._socket.makefile("rb")
        for opened in (self._answers, self._socket):
            weakref.finalize(self, opened.close)

    def interrupt(self) -> None:
        shut_down(self._socket)

    def get(self, keys: Sequence[str], timeout_s: float) -> list[Any]:
        """Wait for `keys`, for at most `timeout_s` seconds, and return their values."""
        values: list[Any] | None = self.request("get", list(keys), timeout_s, wait_s=timeout_s)
        if values is None:
            raise self._timeout_error(
                f"Other workers did not set {', '.join(keys)} within {timeout_s:g} s."
            )
        return values

    def request(self, operation: str, *arguments: Any, wait_s: float = 0.0) -> Any:
        """Send a request and return the answer, which the server may delay by `wait_s` seconds."""
        try:
            with self._lock:
                self._socket.settimeout(wait_s + _ANSWER_S)
                self._socket.sendall(add_length(pickle.dumps((operation, *arguments))))
                return pickle.loads(read(self._answers))
        except TimeoutError as error:
            raise self._closed_error(
                f"{self._name} did not answer for {wait_s + _ANSWER_S:g} s."
            ) from error
        except (OSError, EOFError) as error:
            raise self._closed_error(
                f"{self._name} is closed, because this generation of workers has ended."
            ) from error
