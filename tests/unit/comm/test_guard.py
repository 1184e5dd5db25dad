"""A guard ends a process that stands still, where its host reaches nobody, and no other one."""

import contextlib
import os
import signal
import socket
import time

import psutil
import pytest

from raysgd.comm.guard import Guard
from tests.conftest import FORKS, wait_until

NOBODY = ("255.255.255.255", 1)
"""An address that no connection can have."""
FOREVER_S = 1000.0


def guarded(terms, told):
    guard = Guard()
    if os.fork() == 0:  # as a loader's worker process does, which keeps the pipe
        time.sleep(60)
        os._exit(0)
    guard.tell(*terms)
    told.send(guard._process.pid)
    while True:
        guard.tell(*terms)
        time.sleep(0.1)


@contextlib.contextmanager
def full():
    """The address of one that takes no more connections, which takes a while to find out."""
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as server,
        contextlib.ExitStack() as held,
    ):
        held.enter_context(socket.create_connection(server.getsockname()))
        yield server.getsockname()


@pytest.fixture
def start():
    """A function that starts a guarded process; returns that, and its guard."""
    started = []

    def start(*terms):
        here, there = FORKS.Pipe()
        process = FORKS.Process(target=guarded, args=(terms, there), daemon=True)
        process.start()
        found = psutil.Process(process.pid), psutil.Process(here.recv())
        started.append((process, found[0].children()))
        return found

    yield start
    for process, children in started:
        process.kill()
        process.join()
        for child in children:  # a guard ends by itself
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


@pytest.mark.slow("a guard waits for two seconds until it looks around")
def test_who_stands_still_is_ended_where_nobody_answers_and_nobody_else_is(start):
    with socket.create_server(("127.0.0.1", 0)) as driver, full() as late:
        there = driver.getsockname()
        alone, _ = start(NOBODY, FOREVER_S, [NOBODY], 0.5)
        left, _ = start(NOBODY, 0.5, [there], 0.5)  # others are there, and the driver is not
        waits, _ = start(NOBODY, FOREVER_S, [there], 0.5)
        works, _ = start(NOBODY, 0.5, [NOBODY], 0.5)
        stands, guard = start(there, 0.5, [NOBODY], 0.5)
        back, asks = start(late, 0.0, [late] * 6, 0.0)
        for process in (alone, left, waits, stands, back):
            process.send_signal(signal.SIGSTOP)
        wait_until(lambda: asks.net_connections())
        back.send_signal(signal.SIGCONT)  # and is at work when its guard has asked all
        wait_until(lambda: not asks.net_connections())
        for _ in range(6):  # its guard and that of `left` or `waits` have asked often enough
            driver.accept()[0].close()
        wait_until(lambda: not alone.is_running() or alone.status() == psutil.STATUS_ZOMBIE)
        wait_until(lambda: not left.is_running() or left.status() == psutil.STATUS_ZOMBIE)
        assert {process.status() for process in (waits, stands)} == {psutil.STATUS_STOPPED}
        assert psutil.STATUS_ZOMBIE not in {works.status(), back.status()}
        stands.kill()
        wait_until(lambda: not guard.is_running())  # though a fork of it has the pipe
