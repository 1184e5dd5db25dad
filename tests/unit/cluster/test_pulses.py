"""Pulses of a group: which worker is lost, and when one ends by itself."""

import asyncio
import socket
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from raysgd.cluster import pulses as module
from raysgd.cluster.pulses import DriverWatch, EndedError, Pulses, Terms, _answers_now
from raysgd.comm.connection import Listener, connect
from raysgd.comm.pulse import BEAT_S, Pulse
from raysgd.elastic.policies import WorkerInfo
from tests.conftest import wait_until

pytestmark = pytest.mark.skipif(not Pulse.IS_AVAILABLE, reason="only Linux's kernel can be asked")

TERMS = Terms(unreachable_s=0.5, driver_grace_s=60.0, stops=True)
PLACE = WorkerInfo(node_id="a", node_ip="127.0.0.1", pid=77)


@pytest.fixture
def group():
    """Pulses at a listener of their own."""
    listener = Listener("127.0.0.1", "test")
    made = []

    def watched(terms=TERMS):
        lost = Future()
        pulses = Pulses(terms, lambda info: listener, lambda: [pulse for pulse, _ in made])
        made.append((pulses.of(PLACE, lost.set_result), lost))
        return made[-1]

    yield SimpleNamespace(listener=listener, watched=watched)
    listener.close()


class Watching:
    """A worker's end, which notes when it stops and when it ends."""

    def __init__(self, monkeypatch, address, terms=TERMS):
        self.stopped, self.ended = threading.Event(), threading.Event()
        monkeypatch.setattr(module, "_end", self.ended.set)
        assert DriverWatch(address, terms, self.stopped.set, lambda: []).start() == ""


def test_a_worker_that_is_given_up_stops_and_ends(monkeypatch, group):
    pulse, lost = group.watched()
    worker = Watching(monkeypatch, pulse.address)
    wait_until(lambda: pulse.is_heard)
    assert not worker.stopped.is_set()
    pulse.close()
    wait_until(worker.ended.is_set)
    assert worker.stopped.is_set()
    assert not lost.done()


def test_a_worker_whose_connection_breaks_comes_back(monkeypatch, group):
    pulse, lost = group.watched()
    worker = Watching(monkeypatch, pulse.address)
    wait_until(lambda: pulse.is_heard)
    broken = pulse._connection
    broken.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: pulse._connection is not broken)
    wait_until(lambda: pulse.is_heard)
    assert not (worker.stopped.is_set())
    assert not (worker.ended.is_set())
    assert not lost.done()
    pulse.close()
    wait_until(worker.ended.is_set)


def test_a_worker_whose_connection_is_closed_and_that_does_not_come_back_has_died(group):
    pulse, lost = group.watched()
    with connect(pulse.address, 5.0):
        wait_until(lambda: pulse.is_heard)
    closed = time.monotonic()
    assert isinstance(lost.result(20), EndedError)  # though no other worker is heard
    assert time.monotonic() - closed >= TERMS.unreachable_s


def test_a_worker_keeps_its_connection_until_it_has_another(monkeypatch):
    """Or it would look dead, where it stands still in between."""
    one, other = socket.socketpair()
    watch, seen = DriverWatch(("", 0, ""), TERMS, print, list), []

    class Silent:
        def __init__(self, connection):
            pass

        def beat(self):
            return 100.0

    def reconnected():
        other.setblocking(False)
        with pytest.raises(BlockingIOError):  # nothing to read, not even the end
            other.recv(1)
        seen.append("open")

    monkeypatch.setattr(module, "Pulse", Silent)
    monkeypatch.setattr(watch, "_reconnected", reconnected)
    monkeypatch.setattr(module, "_end", lambda: seen.append("ended"))
    with other:
        watch._follow(one)
    assert seen == ["open", "ended"]


DRIVER, PEER = ("10.0.0.1", 1, ""), ("10.0.0.2", 1)


@pytest.fixture
def cut_off(monkeypatch):
    """A worker's end as its driver cannot be reached, and of its peers those that are said."""

    def cut_off(peers=(), reached=(), grace_s=60.0, stops=True, tries=10**6):
        def connect(address, *timeouts):
            nonlocal tries
            tries -= 1
            if tries < 0:
                return "connected"
            raise TimeoutError

        monkeypatch.setattr(module, "connect", connect)
        monkeypatch.setattr(module, "answers", lambda address: address in reached)
        monkeypatch.setattr(module, "_ALONE_S", 0.2)
        monkeypatch.setattr(module, "_RETRY_S", 0.01)
        stopped, began = [], time.monotonic()
        terms = Terms(0.5, driver_grace_s=grace_s, stops=stops)
        watch = DriverWatch(DRIVER, terms, lambda: stopped.append(1), lambda: peers)
        connection = watch._reconnected()
        return connection, bool(stopped), time.monotonic() - began

    return cut_off


def test_a_worker_that_reaches_nobody_stops_and_ends_soon(cut_off, capsys):
    connection, has_stopped, _ = cut_off(peers=[PEER])
    assert (connection, has_stopped) == (None, True)
    assert "and no other worker either: this worker ends." in capsys.readouterr().err


@pytest.mark.parametrize("peers", [[], [PEER]])
def test_a_worker_that_reaches_others_stops_and_holds_still_for_as_long_as_is_said(
    cut_off, capsys, peers
):
    connection, has_stopped, took_s = cut_off(peers, reached=[PEER], grace_s=0.5)
    assert (connection, has_stopped) == (None, True)
    assert took_s > 0.5
    assert "(driver_grace_s): this worker ends." in capsys.readouterr().err


def test_what_cannot_be_repeated_is_not_stopped(cut_off):
    """As a training function, which waits in its next report."""
    connection, has_stopped, _ = cut_off([PEER], stops=False, reached=[PEER], tries=20)
    assert (connection, has_stopped) == ("connected", False)


def test_a_driver_whose_process_is_stopped_is_waited_for(cut_off):
    """Its kernel answers, though nobody accepts what is connected."""
    connection, has_stopped, took_s = cut_off(reached=[DRIVER[:2]], grace_s=0.2, tries=40)
    assert (connection, has_stopped) == ("connected", False)
    assert took_s > 0.3


def test_who_cannot_connect_says_so(group):
    pulse, _ = group.watched()
    group.listener.close()
    assert "refused" in DriverWatch(pulse.address, TERMS, print, list).start()


def test_an_answer_that_came_while_the_driver_had_no_processor_counts():
    """Both the answer and the end of the wait are there when it looks."""

    async def asked():
        loop = asyncio.get_running_loop()
        loop.sock_connect = lambda probe, address: asyncio.sleep(0.1)
        loop.call_later(0.05, time.sleep, 2 * BEAT_S)
        one, other = socket.socketpair()
        with one, other:
            return await _answers_now(one.getpeername())

    assert asyncio.run(asked())
