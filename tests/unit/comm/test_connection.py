"""Connections: authentication, strangers that must not block others, and cleanup."""

import contextlib
import os
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.comm import connection as module
from raysgd.comm.connection import Listener, add_length, connect, derive_key, read, receive, send
from tests.conftest import Script, examples, wait_until

HOST = "127.0.0.1"
WAIT_S = 20


async def echo(connection):
    while True:
        await send(connection, await receive(connection))


@pytest.fixture(scope="module")
def address():
    """The address of an echo service."""
    listener = Listener(HOST, "test")
    yield listener.expect(echo)
    listener.close()


@pytest.fixture
def listener():
    listener = Listener(HOST, "test")
    yield listener
    listener.close()


def echoed(connection, content):
    with connection.makefile("rb") as stream:
        connection.sendall(add_length(content))
        return read(stream)


def closed_at_once(connection):
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


@given(contents=st.lists(st.binary(max_size=100) | st.integers(0, 2**21).map(bytes), max_size=5))
def test_messages_come_whole_and_in_order(address, contents):
    with connect(address, WAIT_S) as connection, connection.makefile("rb") as stream:
        for content in contents:
            connection.sendall(add_length(content))
            assert read(stream) == content


def test_an_incomplete_message_is_not_delivered(listener):
    async def cut(connection):
        connection.send(add_length(b"whole") + add_length(b"cut off")[:-1])

    with connect(listener.expect(cut), WAIT_S) as connection, connection.makefile("rb") as stream:
        assert read(stream) == b"whole"
        with pytest.raises(EOFError):
            read(stream)


def hello_of(address):
    return b"sgd2" + module._name(address.key) + bytes(32)


def test_wrong_key_is_refused(address):
    with pytest.raises(ConnectionError, match="listener has closed"):
        connect(address._replace(key="guess"), WAIT_S)
    with socket.create_connection(address[:2], WAIT_S) as liar:
        liar.sendall(hello_of(address))  # the hello is in clear text
        assert len(liar.recv(64, socket.MSG_WAITALL)) == 64
        liar.sendall(bytes(32))
        assert closed_at_once(liar)


def test_replayed_proof_is_refused(address):
    """Neither end accepts recorded messages of an earlier handshake."""
    with socket.create_server((HOST, 0)) as between:
        said = {}

        def listen_in():
            client, _ = between.accept()
            with client, socket.create_connection(address[:2], WAIT_S) as server:
                server.sendall(said.setdefault("hello", client.recv(52, socket.MSG_WAITALL)))
                client.sendall(said.setdefault("answer", server.recv(64, socket.MSG_WAITALL)))
                server.sendall(said.setdefault("proof", client.recv(32, socket.MSG_WAITALL)))

        thread = threading.Thread(target=listen_in)
        thread.start()
        connect(address._replace(port=between.getsockname()[1]), WAIT_S).close()
        thread.join(WAIT_S)
        for last in (said["proof"], said["answer"][32:]):
            with socket.create_connection(address[:2], WAIT_S) as again:
                again.sendall(said["hello"])
                again.recv(64, socket.MSG_WAITALL)
                again.sendall(last)
                assert closed_at_once(again)

        def play_back():
            client, _ = between.accept()
            with client:
                client.sendall(said["answer"])
                client.recv(100)

        thread = threading.Thread(target=play_back)
        thread.start()
        with pytest.raises(ConnectionError, match="does not know the key"):
            connect(address._replace(port=between.getsockname()[1]), WAIT_S)
        thread.join(WAIT_S)


@examples(60)
@given(said=st.binary(max_size=200), ends=st.booleans(), known=st.booleans())
def test_strangers_do_not_disturb_other_connections(address, said, ends, known):
    with socket.create_connection(address[:2], WAIT_S) as stranger:
        stranger.sendall((hello_of(address) if known else b"") + said)
        if ends:
            with contextlib.suppress(OSError):  # already disconnected
                stranger.shutdown(socket.SHUT_WR)
        with connect(address, WAIT_S) as connection:
            assert echoed(connection, b"?") == b"?"


def test_silent_strangers_are_sent_away_after_a_while(listener, monkeypatch):
    monkeypatch.setattr(module, "_HANDSHAKE_S", 0.1)
    address = listener.expect(echo)
    with socket.create_connection(address[:2], WAIT_S) as silent:
        with socket.create_connection(address[:2], WAIT_S) as slow:
            slow.sendall(b"sgd2")
            assert closed_at_once(slow)
        assert closed_at_once(silent)


def test_oldest_of_too_many_strangers_is_closed(listener, monkeypatch):
    monkeypatch.setattr(module, "_MAX_UNAUTHENTICATED", 3)
    address = listener.expect(echo)
    with contextlib.ExitStack() as there, connect(address, WAIT_S) as connection:
        assert echoed(connection, b"?") == b"?"  # it is no stranger any more
        strangers = [
            there.enter_context(socket.create_connection(address[:2], WAIT_S)) for _ in range(4)
        ]
        assert closed_at_once(strangers[0])
        assert echoed(connection, b"?") == b"?"
        assert len(listener._unauthenticated) == 3


def test_a_connection_that_comes_while_the_listener_closes_is_closed():
    listener = Listener(HOST, "test")
    address, go_on = listener.expect(echo), threading.Event()
    listener._loop.call_soon_threadsafe(go_on.wait, WAIT_S)
    with socket.create_connection(address[:2], WAIT_S) as late:
        listener._loop.call_soon_threadsafe(listener._closed.set)
        go_on.set()
        listener.close()
        assert closed_at_once(late)  # and Python does not warn of an unclosed socket


LISTENING = """
import os, resource, sys
from raysgd.comm.connection import Listener
from tests.unit.comm.test_connection import echo

listener = Listener("127.0.0.1", "test")
address = listener.expect(echo)
limit = max(map(int, os.listdir("/dev/fd"))) + 3
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
print(*address, flush=True)
sys.stdin.read()
"""


def test_strangers_make_way_if_no_descriptor_is_left():
    with contextlib.ExitStack() as stack:
        script = stack.enter_context(contextlib.closing(Script(LISTENING)))
        host, port, key = script.stdout.readline().split()
        for _ in range(4):
            stack.enter_context(socket.create_connection((host, int(port)), WAIT_S))
        with connect(module.Address(host, int(port), key), WAIT_S) as connection:
            assert echoed(connection, b"?") == b"?"


def test_a_client_of_another_protocol_is_sent_away_at_once(address):
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\0\0"):
        with socket.create_connection(address[:2], WAIT_S) as stranger:
            stranger.sendall(said)
            assert closed_at_once(stranger)


def test_forgotten_address_is_refused(listener):
    first, second = listener.expect(echo), listener.expect(echo, key=derive_key("a", "b"))
    listener.forget(first)
    with pytest.raises(ConnectionError):
        connect(first, WAIT_S)
    assert first.port == second.port
    with connect(second, WAIT_S) as connection:
        assert echoed(connection, b"?") == b"?"


def test_both_ends_notice_when_the_other_host_is_gone(listener):
    seen = []

    async def note(connection):
        seen.append(connection)
        await echo(connection)

    with connect(listener.expect(note), WAIT_S) as connection:
        assert echoed(connection, b"?") == b"?"
        for end in (connection, seen[0]):
            names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
            options = [end.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names]
            assert options == [30, 10, 3, 60_000]
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_closing_also_ends_connections_that_forked_processes_hold(listener):
    address = listener.expect(echo)
    with connect(address, WAIT_S) as connection:
        assert echoed(connection, b"?") == b"?"
        opened = [listener._server, *listener._connections]
        held = [os.dup(each.fileno()) for each in opened]
        assert len(held) == 2
        listener.close()
        assert closed_at_once(connection)
    with pytest.raises(ConnectionError):
        connect(address, WAIT_S)
    for descriptor in held:
        os.close(descriptor)


def test_a_closed_listener_leaves_no_thread_and_no_descriptor():
    def use():
        listener = Listener(HOST, "test")
        with connect(listener.expect(echo), WAIT_S) as connection:
            echoed(connection, b"?")
        listener.close()

    def left():
        return len(os.listdir("/dev/fd")), threading.active_count()

    use()
    before = left()
    for _ in range(20):
        use()
    # Ray opens and closes some of both in this process, for clusters of other tests.
    wait_until(lambda: all(now < then + 10 for now, then in zip(left(), before, strict=True)))
