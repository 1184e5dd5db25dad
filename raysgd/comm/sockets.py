"""The TCP sockets of this process, whoever opened them."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Endpoint", "confirmation", "endpoints", "is_unconfirmed", "listeners", "shut_down"]

_INFO = struct.Struct("=2x B 21x I 28x I")
"""tcpi_retransmits, tcpi_unacked and tcpi_last_ack_recv of struct tcp_info in linux/tcp.h."""
_NUM_RETRIES = 3
"""How often a kernel has sent something again after 1.4 s, at the earliest."""


def shut_down(connection: socket.socket) -> None:
    """End a connection, also where processes that were forked have its descriptor."""
    with contextlib.suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)


def confirmation(connection: socket.socket) -> tuple[int, float, int]:
    """Return what the kernel knows of the host at the other end; on Linux alone.

    That host's kernel confirms what it receives, whatever the process does for which it is.

    Returns:
        How many packets have not been confirmed, since when nothing was, in seconds, and how often
        the first of them was sent again.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    num_retries, num_packets, silent_ms = _INFO.unpack(info)
    return num_packets, silent_ms / 1000, num_retries


def is_unconfirmed(connection: socket.socket, silence_s: float) -> bool:
    """Whether what was sent has not been confirmed for so long, nor anything else; not below 2 s.

    It is not a sign of that where the other process reads nothing: then nothing is sent, and every
    question whether it may be is answered.
    """
    if not hasattr(socket, "TCP_INFO"):
        return False
    num_packets, silent_s, num_retries = confirmation(connection)
    return num_packets > 0 and silent_s >= silence_s and num_retries >= _NUM_RETRIES


@dataclass(frozen=True)
class Endpoint:
    """A TCP socket of this process; `remote` is None where it listens."""

    descriptor: int
    local: tuple[str, int]
    remote: tuple[str, int] | None

    def is_unconfirmed(self, silence_s: float) -> bool:
        """See `is_unconfirmed`."""
        with contextlib.suppress(OSError), _borrowed(self.descriptor) as sock:
            return is_unconfirmed(sock, silence_s)
        return False

    def shut_down(self) -> None:
        """Shut the connection down; the descriptor stays open for its owner."""
        with contextlib.suppress(OSError), _borrowed(self.descriptor) as sock:
            shut_down(sock)


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Open a socket object on a descriptor that someone else owns."""
    copy = os.dup(descriptor)
    try:
        sock = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with sock:
        yield sock


def endpoints() -> list[Endpoint]:
    """Return the TCP sockets of this process.

    From its descriptors: the system's table of connections loses entries while it is read.
    """
    found = []
    for name in os.listdir("/dev/fd"):
        # not every descriptor is a socket, and other threads close theirs meanwhile
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
    """Return the addresses on which this process listens."""
    return {endpoint.local for endpoint in endpoints() if endpoint.remote is None}
