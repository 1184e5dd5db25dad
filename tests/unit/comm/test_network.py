"""Addresses of this machine, and the TCP sockets of this process."""

import contextlib
import os
import re
import socket
import sys

import pytest

from raysgd.comm import network
from raysgd.comm.network import (
    LOOPBACK,
    TcpSocket,
    driver_address,
    interface_of,
    listening_addresses,
    tcp_sockets,
)
from tests.conftest import wait_until

ELSEWHERE = "203.0.113.9"
"""An address that is reserved for documentation, so no machine has it."""


def test_an_endpoint_knows_what_it_has_sent_while_the_other_end_read():
    with socket.create_server((LOOPBACK, 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    with sender, receiver:
        (tcp_socket,) = [each for each in tcp_sockets() if each.local == sender.getsockname()]
        assert tcp_socket.count_sent()[0] <= 1
        sender.setblocking(False)
        num_bytes = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                num_bytes += sender.send(bytes(2**16))

        def busy_s():
            info = sender.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 184)
            return int.from_bytes(info[168:176], sys.byteorder) / 1e6

        wait_until(lambda: busy_s() > 0.3)
        assert tcp_socket.count_sent()[1] < 0.2, "the receiver reads nothing"
        receiver.setblocking(False)

        def has_arrived():
            with contextlib.suppress(BlockingIOError):
                receiver.recv(2**24)
            return tcp_socket.count_sent()[0] >= num_bytes

        wait_until(has_arrived)
    assert TcpSocket(tcp_socket.descriptor, ("", 0), None).count_sent() == (0, 0.0), "it is closed"


@pytest.mark.parametrize(
    ("addresses", "single"),
    [
        ([LOOPBACK], True),
        ([LOOPBACK] * 3, True),
        ([ELSEWHERE] * 2, False),  # one node, but not this one
        ([LOOPBACK, ELSEWHERE], False),
    ],
)
def test_workers_on_other_nodes_get_the_address_of_the_route(monkeypatch, addresses, single):
    asked = []
    monkeypatch.setattr(network, "address_towards", lambda to: asked.append(to) or "10.1.2.3")
    assert network.is_single_node(addresses) is single
    assert driver_address(addresses) == (LOOPBACK if single else "10.1.2.3")
    assert asked == ([] if single else addresses[:1])


def test_unknown_address_error_lists_the_known_ones(monkeypatch):
    monkeypatch.setattr(network, "interfaces", lambda: {"10.1.2.3": "eth0", LOOPBACK: "lo"})
    with pytest.raises(RuntimeError, match=re.escape(ELSEWHERE)) as caught:
        interface_of(ELSEWHERE)
    assert "have 10.1.2.3, 127.0.0.1. Set GLOO_SOCKET_IFNAME" in str(caught.value)
    monkeypatch.setattr(network, "interfaces", dict)
    with pytest.raises(RuntimeError, match="have none"):
        interface_of(ELSEWHERE)


@pytest.fixture(params=["127.0.0.1", "::1"])
def pair(request):
    """A listener and both ends of a connection to it."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    try:
        server = socket.create_server((request.param, 0), family=family)
    except OSError:
        pytest.skip("this machine has no such addresses")
    with server:
        client = socket.create_connection(server.getsockname()[:2])
        peer, _ = server.accept()
        client.settimeout(20)
        peer.settimeout(20)
        with client, peer:
            yield server, client, peer


def test_all_ends_are_found_with_their_addresses(pair):
    server, client, peer = pair
    at, to = server.getsockname()[:2], client.getsockname()[:2]
    found = tcp_sockets()
    assert TcpSocket(server.fileno(), at, None) in found
    assert TcpSocket(client.fileno(), to, at) in found
    assert TcpSocket(peer.fileno(), at, to) in found
    assert at in listening_addresses()
    assert to not in listening_addresses()


def test_shutting_an_end_down_wakes_both_and_closes_none(pair):
    _, client, peer = pair
    (end,) = (each for each in tcp_sockets() if each.descriptor == client.fileno())
    TcpSocket(end.descriptor, end.remote, end.local).shut_down()  # of an earlier socket
    client.sendall(b"1")
    assert peer.recv(1) == b"1"
    end.shut_down()
    assert (client.recv(1), peer.recv(1)) == (b"", b"")
    os.fstat(client.fileno())  # still open: the owner closes it
    client.close()
    end.shut_down()  # no error after the owner has closed it


def test_sockets_of_other_kinds_are_left_out():
    left, right = socket.socketpair()
    with (
        left,
        right,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        socket.socket(socket.AF_INET, socket.SOCK_STREAM) as unconnected,
    ):
        datagrams.connect(("127.0.0.1", 1))
        others = {each.fileno() for each in (left, right, datagrams, unconnected)}
        assert not others & {each.descriptor for each in tcp_sockets()}
