"""The TCP sockets of this process, found by their descriptors."""

import os
import socket

import pytest

from raysgd.comm.sockets import Endpoint, endpoints, listeners


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
    found = endpoints()
    assert Endpoint(server.fileno(), at, None) in found
    assert Endpoint(client.fileno(), to, at) in found
    assert Endpoint(peer.fileno(), at, to) in found
    assert at in listeners()
    assert to not in listeners()


def test_shutting_an_end_down_wakes_both_and_closes_none(pair):
    _, client, peer = pair
    (end,) = (each for each in endpoints() if each.descriptor == client.fileno())
    end.shut_down()
    assert (client.recv(1), peer.recv(1)) == (b"", b"")
    assert end.descriptor == client.fileno()
    os.fstat(client.fileno())  # which the owner has to close
    client.close()
    end.shut_down()  # a descriptor that its owner has closed is no error


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
        assert not others & {each.descriptor for each in endpoints()}
