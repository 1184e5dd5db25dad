"""When the driver declares a worker lost, and when a worker exits by itself."""

import asyncio
import re
import socket
import sys
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from raysgd.cluster import host_monitor as module
from raysgd.cluster.host_monitor import DriverWatch, HostError, HostMonitor, HostWatch
from raysgd.comm.connection import Listener, connect
from tests.conftest import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="hosts are watched on Linux only")

HOST = "10.0.0.7"


class Watched:
    """A watch, and a flag for whether the driver reaches another worker."""

    def __init__(self, listener, driver_grace_s=60.0):
        self.is_any_reachable = False
        self.lost = Future()
        self.monitor = HostMonitor(driver_grace_s, True, lambda: self.is_any_reachable)
        self.watch = HostWatch(HOST, self.lost.set_result, self.monitor, listener)


@pytest.fixture
def listener():
    listener = Listener("127.0.0.1", "test")
    yield listener
    listener.close()


@pytest.fixture
def watched(listener, monkeypatch):
    monkeypatch.setattr(module, "_RECONNECT_S", 0.5)
    monkeypatch.setattr(module, "_RECONNECT_EVERY_S", 0.02)
    return Watched(listener)


class Worker:
    """A worker's end of the connection. It records whether the worker stopped and exited."""

    def __init__(self, address=None, driver_grace_s=60.0):
        self.stopped, self.ended = threading.Event(), threading.Event()
        self.watch = DriverWatch(address, driver_grace_s, self.stopped.set)


@pytest.fixture
def worker(watched, monkeypatch):
    """A worker that is connected to the driver."""
    worker = Worker(watched.watch.address)
    monkeypatch.setattr(module, "_kill_own_process", worker.ended.set)
    monkeypatch.setattr(module, "_KILL_GRACE_S", 0.05)
    assert worker.watch.start() == ""
    wait_until(lambda: watched.watch._connection is not None)
    yield worker
    watched.watch.close()
    wait_until(worker.ended.is_set)  # before monkeypatch restores _end, which exits this process


class SilentSocket(socket.socket):
    """A connection to a host that no longer answers."""

    def recv(self, size):
        raise TimeoutError(110, "Connection timed out")


def follow_silent(watch):
    """Let a watch follow a connection to a silent host, in the thread of its listener."""

    async def follow():
        with SilentSocket() as connection:
            connection.setblocking(False)
            await watch._watch(connection)

    asyncio.run_coroutine_threadsafe(follow(), watch.listener._loop)


# ---- the driver's end


def test_an_idle_connection_is_probed_each_second(watched):
    with connect(watched.watch.address, 5.0):
        wait_until(lambda: watched.watch._connection is not None)
        options = "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"
        found = [
            watched.watch._connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, option))
            for option in options
        ]
        assert found == [1, 1, 3]
        assert watched.watch._connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_a_worker_on_a_silent_host_is_lost_if_another_is_reached(watched):
    follow_silent(watched.watch)
    wait_until(lambda: watched.watch.is_silent)
    assert not watched.lost.done()
    watched.is_any_reachable = True
    error = watched.lost.result(20)
    said = re.search(r"its host 10\.0\.0\.7 has not answered the driver for ([\d.]+) s", str(error))
    assert float(said[1]) >= 4


def test_if_no_worker_is_reached_the_driver_waits_for_the_grace(listener):
    watched, began = Watched(listener, driver_grace_s=0.5), time.monotonic()
    follow_silent(watched.watch)
    assert "has not answered the driver" in str(watched.lost.result(20))
    assert time.monotonic() - began >= 0.5


def test_a_worker_that_reconnects_is_not_silent_any_more(watched):
    follow_silent(watched.watch)
    wait_until(lambda: watched.watch.is_silent)
    with connect(watched.watch.address, 5.0):
        wait_until(lambda: not watched.watch.is_silent)
        watched.is_any_reachable = True
        wait_until(lambda: watched.watch.is_reachable)
        assert not watched.lost.done()


def test_worker_that_does_not_reconnect_is_lost(watched):
    watched.is_any_reachable = True
    with connect(watched.watch.address, 5.0):
        wait_until(lambda: watched.watch._connection is not None)
        closed = time.monotonic()
    error = watched.lost.result(20)
    assert isinstance(error, HostError)
    assert "closed the connection" in str(error)
    assert time.monotonic() - closed >= module._RECONNECT_S
    assert not watched.watch.is_silent


def test_a_host_counts_as_reached_only_after_a_while(watched, monkeypatch):
    monkeypatch.setattr(module, "_RECONNECT_S", 3600.0)
    assert not watched.watch.is_reachable
    with connect(watched.watch.address, 5.0):
        wait_until(lambda: watched.watch._connection is not None)
        assert not watched.watch.is_reachable
        monkeypatch.setattr(module, "_RECONNECT_S", 0.0)
        assert watched.watch.is_reachable


def test_workers_on_the_drivers_host_are_not_watched(watched):
    assert watched.monitor.watch("127.0.0.1", watched.lost.set_result) is None


def test_driver_logs_once_that_no_host_answers(watched, caplog):
    a, b = (SimpleNamespace(host=host, is_silent=True) for host in ("10.0.0.5", HOST))
    is_cut_off = watched.monitor.is_cut_off
    assert not is_cut_off([])
    assert not is_cut_off([a, None])  # None: a worker on the driver's host
    assert not caplog.records
    assert is_cut_off([a, b])
    assert is_cut_off([a, b])
    b.is_silent = False
    assert not is_cut_off([a, b])
    assert not is_cut_off([a, b])
    (record,) = caplog.records
    assert "No worker's host (10.0.0.5, 10.0.0.7) answers the driver" in record.getMessage()


# ---- the worker's end


def test_a_worker_that_the_driver_refuses_stops_and_ends(watched, worker):
    assert not worker.stopped.is_set()
    watched.watch.close()
    wait_until(worker.ended.is_set)
    assert worker.stopped.is_set()
    assert not watched.lost.done()


def test_a_worker_whose_connection_breaks_reconnects_and_continues(watched, worker):
    broken = watched.watch._connection
    broken.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: watched.watch._connection is not broken)
    assert not worker.stopped.is_set()
    assert not worker.ended.is_set()
    assert not watched.lost.done()


def test_worker_without_driver_stops_and_exits_after_the_grace(monkeypatch, capsys):
    def unreachable(*arguments):
        raise TimeoutError

    monkeypatch.setattr(module, "connect", unreachable)
    worker, began = Worker(driver_grace_s=0.3), time.monotonic()
    assert worker.watch._reconnect() is None
    assert 0.3 < time.monotonic() - began < 20
    assert worker.stopped.is_set()
    assert "this worker exits because the driver was unreachable" in capsys.readouterr().err


def test_a_worker_that_reaches_the_driver_in_time_stays(monkeypatch):
    tries = iter([TimeoutError, OSError, ConnectionRefusedError])

    def connect(*arguments):
        for error in tries:
            raise error
        return "connection"

    monkeypatch.setattr(module, "connect", connect)
    worker = Worker()
    assert worker.watch._reconnect() == "connection"
    assert worker.stopped.is_set()


def test_a_worker_that_cannot_connect_returns_why(watched, listener):
    listener.close()
    assert "refused" in DriverWatch(watched.watch.address, 60.0, print).start()
