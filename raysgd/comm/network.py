"""Network addresses and interfaces of this machine."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import psutil

LOOPBACK = "127.0.0.1"


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
        name: str = sock.getsockname()[0]
        return name


def is_single_node(addresses: Sequence[str]) -> bool:
    """Return whether all addresses are this machine's."""
    return len(set(addresses)) == 1 and addresses[0] in {LOOPBACK, *interfaces()}


def driver_address(addresses: Sequence[str]) -> str:
    """Return the address at which workers reach this machine."""
    return LOOPBACK if is_single_node(addresses) else address_towards(addresses[0])


def interface_of(address: str) -> str:
    found = interfaces()
    if address not in found:
        raise RuntimeError(
            f"Ray reports the address {address} for this node, but its network interfaces have "
            f"{', '.join(found) or 'none'}. Set GLOO_SOCKET_IFNAME to the interface for the "
            "workers."
        )
    return found[address]
