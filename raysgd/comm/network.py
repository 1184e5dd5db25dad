"""Addresses of this machine, and the TCP sockets of this process."""

import contextlib
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

LOOPBACK = "127.0.0.1"
_INFO, _INFO_BYTES = struct.Struct("=120xQ40xQQ"), 184
"""tcpi_bytes_acked, tcpi_busy_time and tcpi_rwnd_limited in the ``tcp_info`` of Linux."""


def interfaces() -> dict[str, str]:
    """Return the interface names of this machine, by IPv4 address."""
    return {
        address.address: name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET
    }


def address_towards(address: str) -> str:
    """Return this machine's source address for packets to `address`. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((address, 1))
        return str(sock.getsockname()[0])


def is_single_node(addresses: Sequence[str]) -> bool:
    """Return whether all addresses are this machine's."""
    return len(set(addresses)) == 1 and addresses[0] in {LOOPBACK, *interfaces()}


def driver_address(addresses: Sequence[str]) -> str:
    """Return the address at which workers reach this machine."""
    return LOOPBACK if is_single_node(addresses) else address_towards(addresses[0])


def worker_address(driver_host: str, node_ip: str) -> str:
    """Return the address at which other workers reach a worker, given `driver_address`."""
    return LOOPBACK if driver_host == LOOPBACK else node_ip


def interface_of(address: str) -> str:
    names = interfaces()
    if address not in names:
        raise RuntimeError(
            f"Ray reports the address {address} for this node, but its network interfaces have "
            f"{', '.join(names) or 'none'}. Set GLOO_SOCKET_IFNAME to the interface for the "
            "workers."
        )
    return names[address]


# ---- sockets, including those that other libraries opened


def shut_down(connection: socket.socket) -> None:
    """End a connection, even if forked processes share its descriptor."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True)
class TcpSocket:
    """A TCP socket of this process. `remote` is None if it listens."""

    descriptor: int
    local: tuple[str, int]
    remote: tuple[str, int] | None

    def shut_down(self) -> None:
        with contextlib.suppress(OSError), _borrowing(self.descriptor) as sock, sock.dup() as held:
            # Another thread may have closed the socket, and another socket has its number.
            if (held.getsockname()[:2], held.getpeername()[:2]) == (self.local, self.remote):
                shut_down(held)

    def count_sent(self) -> tuple[int, float]:
        """Return the bytes that have arrived at the other end, and the seconds of sending them.

        The time does not include waiting until the other end reads. (0, 0.0) if unknown.
        """
        with contextlib.suppress(OSError, AttributeError, struct.error):
            with _borrowing(self.descriptor) as sock:
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            num_bytes, busy_us, unread_us = _INFO.unpack_from(info)
            return num_bytes, (busy_us - unread_us) / 1e6
        return 0, 0.0


@contextlib.contextmanager
def _borrowing(descriptor: int) -> Iterator[socket.socket]:
    sock = socket.socket(fileno=descriptor)
    try:
        yield sock
    finally:
        sock.detach()  # the descriptor stays open


def tcp_sockets() -> list[TcpSocket]:
    """Return the TCP sockets of this process. The table of the kernel can miss some of them."""
    sockets = []
    for name in os.listdir("/dev/fd"):
        # Some descriptors are not sockets, or another thread has just closed them.
        with contextlib.suppress(OSError), _borrowing(int(name)) as sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6) or (
                sock.type != socket.SOCK_STREAM
            ):
                continue
            listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            remote = None if listens else sock.getpeername()[:2]
            sockets.append(TcpSocket(int(name), sock.getsockname()[:2], remote))
    return sockets


def listening_addresses() -> set[tuple[str, int]]:
    return {tcp_socket.local for tcp_socket in tcp_sockets() if tcp_socket.remote is None}
