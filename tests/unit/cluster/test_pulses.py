"""Pulses of a group: which worker is lost, and when one ends by itself."""

import asyncio
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from raysgd.cluster import pulses as module
from raysgd.cluster.pulses import DriverWatch, Pulses, Terms, _answers_now
from raysgd.comm.connection import Listener
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
        lost = threading.Event()
        pulses = Pulses(terms, lambda info: listener, lambda: [pulse for pulse, _ in made])
        made.append((pulses.of(PLACE, lambda error: lost.set()), lost))
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
    assert not lost.is_set()


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
    assert not (lost.is_set())
    pulse.close()
    wait_until(worker.ended.is_set)


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
            return await _answers_now(one)

    assert asyncio.run(asked())
