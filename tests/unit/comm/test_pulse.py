"""Pulses: who is there as long as a kernel confirms what it receives."""

import contextlib
import os
import signal
import socket
import time

import psutil
import pytest

from raysgd.comm.guard import answers
from raysgd.comm.pulse import BEAT_S, Pulse
from tests.conftest import FORKS, wait_until

pytestmark = pytest.mark.skipif(not Pulse.IS_AVAILABLE, reason="only Linux's kernel can be asked")

SILENCE_S = 1.0


@contextlib.contextmanager
def connected():
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with one, other:
        yield one, other


def hold(connection):
    connection.recv(1)
    signal.pause()


def test_a_process_that_is_stopped_and_reads_nothing_is_on_a_host_that_lives():
    with connected() as (one, other):
        other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        stopped = FORKS.Process(target=hold, args=(other,), daemon=True)
        stopped.start()
        try:
            one.send(b"\0")
            os.kill(stopped.pid, signal.SIGSTOP)
            wait_until(lambda: psutil.Process(stopped.pid).status() == psutil.STATUS_STOPPED)
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):  # until nothing more goes
                while True:
                    one.send(bytes(65536))
            pulse, ends = Pulse(one), time.monotonic() + 3 * SILENCE_S
            while time.monotonic() < ends:
                assert pulse.beat() < SILENCE_S
                time.sleep(BEAT_S)
        finally:
            stopped.kill()
            stopped.join()


def test_both_ends_beat_and_the_end_of_one_is_told():
    with connected() as (one, other):
        pulses = Pulse(one), Pulse(other)
        for _ in range(3):
            assert [pulse.beat() for pulse in pulses] == [0.0, 0.0]
            time.sleep(BEAT_S)
        other.close()
        with pytest.raises(ConnectionError):
            wait_until(lambda: pulses[0].beat())


def test_a_host_answers_where_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        assert answers(address)
    assert answers(address)
