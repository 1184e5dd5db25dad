"""One round in which all workers of a generation tell each other something, through the driver."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import Any

from raysgd.comm.sockets import shut_down

__all__ = ["Exchange", "exchanged"]

_CONNECT_S = 10.0


class Exchange:
    """Gives every worker what all of them said, when the last one has. Lives on the driver.

    Each worker sends a line of JSON, ``[rank, value]``, and gets back the list of all values in
    the order of the ranks. Closed, it breaks the connections of those that still wait.

    Args:
        host: address to listen on.
        size: number of workers.
    """

    def __init__(self, host: str, size: int) -> None:
        self._size = size
        self._said: dict[int, Any] = {}
        self._held: list[socket.socket] = []
        self._changed = threading.Lock()
        self._closed = False
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="raysgd-exchange", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            with self._changed:
                self._held.append(connection)
                if self._closed:
                    connection.close()
            threading.Thread(target=self._hear, args=(connection,), daemon=True).start()

    def _hear(self, connection: socket.socket) -> None:
        try:
            with connection.makefile("r") as stream:
                rank, value = json.loads(stream.readline())
        except (OSError, ValueError, TypeError):  # it has gone, or is no worker of ours
            return
        with self._changed:
            self._said[rank] = value
            if len(self._said) < self._size:
                return
            answer = json.dumps([self._said[each] for each in sorted(self._said)]) + "\n"
            for held in self._held:
                with contextlib.suppress(OSError):  # it may have gone meanwhile
                    held.sendall(answer.encode())

    def close(self) -> None:
        """Stop listening and close the connections."""
        with self._changed:
            self._closed = True
            for sock in (self._listener, *self._held):
                shut_down(sock)
                sock.close()


def exchanged(server: tuple[str, int], rank: int, value: Any, timeout_s: float) -> list[Any]:
    """Say `value` and return what all workers said, by rank. Runs on a worker.

    Raises:
        ConnectionError: if the driver has closed the exchange.
        TimeoutError: if not all are there within `timeout_s` seconds.
    """
    with socket.create_connection(server, _CONNECT_S) as connection:
        connection.settimeout(timeout_s)
        connection.sendall((json.dumps([rank, value]) + "\n").encode())
        with connection.makefile("r") as stream:
            line = stream.readline()
    if not line:
        raise ConnectionError("The driver has given this generation of workers up.")
    values: list[Any] = json.loads(line)
    return values
