"""A round in which workers tell each other something through the driver."""

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from raysgd.comm.exchange import Exchange, exchanged
from tests.conftest import wait_until


@pytest.fixture
def exchange():
    made = Exchange("127.0.0.1", 3)
    yield made
    made.close()


def test_everyone_gets_what_all_said_by_rank(exchange):
    place = ("127.0.0.1", exchange.port)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda r: exchanged(place, r, f"worker {r}", 20), (2, 0, 1)))
    assert found == [["worker 0", "worker 1", "worker 2"]] * 3


def test_one_that_nobody_closes_keeps_no_process_alive(exchange):
    daemon = [t.daemon for t in threading.enumerate() if t.name == "raysgd-exchange"]
    assert daemon, "one of an earlier test may be ending"
    assert all(daemon)


def test_who_waits_is_told_that_the_exchange_is_closed(exchange):
    errors = []

    def wait():
        try:
            exchanged(("127.0.0.1", exchange.port), 0, "here", 20)
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: exchange._held)
    exchange.close()
    thread.join(20)
    assert isinstance(errors[0], ConnectionError)


def test_closing_ends_what_forked_processes_have_too(exchange):
    """As the processes of a DataLoader have it where the driver is a worker."""
    place = ("127.0.0.1", exchange.port)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(exchanged, place, 0, "here", 10)
        wait_until(lambda: exchange._held)
        held = [os.dup(each.fileno()) for each in (exchange._listener, *exchange._held)]
        try:
            exchange.close()
            with pytest.raises(ConnectionError):
                waits.result()
            with pytest.raises(ConnectionError):
                socket.create_connection(place, 10)
        finally:
            for descriptor in held:
                os.close(descriptor)


def test_a_worker_waits_no_longer_than_it_may(exchange):
    with pytest.raises(TimeoutError):
        exchanged(("127.0.0.1", exchange.port), 0, "here", 0.05)


@pytest.mark.parametrize("line", [b"GET / HTTP/1.1\n", b"5\n", b"[1]\n", b'{"a": 1}\n', b""])
def test_a_stranger_changes_nothing(exchange, line):
    """An error in a thread would fail the test."""
    with socket.create_connection(("127.0.0.1", exchange.port), 10) as stranger:
        stranger.sendall(line)
    while len(exchange._held) < 1:
        pass
    test_everyone_gets_what_all_said_by_rank(exchange)
