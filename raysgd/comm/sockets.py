"""The TCP sockets of this process, including those that other libraries opened."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass


def shut_down(connection: socket.socket) -> None:
    """End a connection, even if forked processes share its descriptor."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True)
class Endpoint:
    """A TCP socket of this process. `remote` is None if it listens."""

    descriptor: int
    local: tuple[str, int]
    remote: tuple[str, int] | None

    def shut_down(self) -> None:
        with contextlib.suppress(OSError), _borrowed(self.descriptor) as sock:
            shut_down(sock)


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    copy = os.dup(descriptor)
    try:
        sock = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with sock:
        yield sock


def endpoints() -> list[Endpoint]:
    """Return the TCP sockets of this process. The table of the kernel can miss some of them."""
    found = []
    for name in os.listdir("/dev/fd"):
        # Some descriptors are not sockets, or another thread has just closed them.
        with contextlib.suppress(OSError), _borrowed(int(name)) as sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6) or (
                sock.type != socket.SOCK_STREAM
            ):
                continue
            listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            remote = None if listens else sock.getpeername()[:2]
            found.append(Endpoint(int(name), sock.getsockname()[:2], remote))
    return found


def listeners() -> set[tuple[str, int]]:
    return {endpoint.local for endpoint in endpoints() if endpoint.remote is None}
