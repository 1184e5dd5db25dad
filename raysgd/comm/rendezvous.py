"""The store through which the workers of one generation find each other: server and client.

torch's own TCPStore does the same, and cannot be relied on where a generation may be given up at
any moment: its client first asks the name server for the name of the address that it connects to,
which costs seconds where that does not answer; it goes on trying a store that was closed until its
time is over; and its waits cannot be ended from outside. Here a wait ends when the driver closes
the store, and when the client is interrupted.

A request is a message with a JSON array, the operation and its arguments, and so is the answer,
with one element.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from raysgd.comm.connection import Address, Listener, connect, framed, read, receive, send
from raysgd.comm.sockets import shut_down

__all__ = ["StoreClient", "StoreServer"]

_CONNECT_S = 10.0
_ANSWER_S = 60.0
"""How long an answer may take beyond what the request itself may wait for."""


class StoreServer:
    """Keeps the keys of one generation in a thread of its own, on a free port of `host`."""

    def __init__(self, host: str) -> None:
        self._values: dict[str, str] = {}
        self._there: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._listener = Listener(host, "raysgd-store")
        self.address = self._listener.expect(self._talk)

    def close(self) -> None:
        """End all connections, and with them the waits of the clients."""
        self._listener.close()

    async def _talk(self, connection: socket.socket) -> None:
        while True:
            operation, *arguments = json.loads(await receive(connection))
            answer = self._do[operation](*arguments)
            if asyncio.iscoroutine(answer):
                answer = await answer
            await send(connection, _packed(answer))
            await asyncio.sleep(0)  # for the others: what can be read and sent at once is

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

    def __init__(self, address: Address) -> None:
        self._name = f"The driver's store at {address.host}:{address.port}"
        self._lock = threading.Lock()
        try:
            self._socket = connect(address, _ANSWER_S, _CONNECT_S)
        except OSError as error:
            raise ConnectionError(
                f"{self._name} cannot be reached ({error}): this generation of workers was given "
                "up, or a firewall is in between."
            ) from error
        self._answers = self._socket.makefile("rb")
        for opened in (self._answers, self._socket):
            weakref.finalize(self, opened.close)

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
        try:
            with self._lock:
                self._socket.settimeout(wait_s + _ANSWER_S)
                self._socket.sendall(framed(_packed(operation, *arguments)))
                return json.loads(read(self._answers))[0]
        except TimeoutError as error:
            raise ConnectionError(
                f"{self._name} did not answer for {wait_s + _ANSWER_S:g} s."
            ) from error
        except (OSError, EOFError) as error:
            raise ConnectionError(
                f"{self._name} is closed: this generation of workers was given up."
            ) from error


def _packed(*values: Any) -> bytes:
    return json.dumps(values).encode()
