"""Checks that `shutdown` ends a call, from a thread, a timer, a signal handler, or asyncio."""

import asyncio
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conftest import SOON_S, wait_until

LONG_S = 60.0


def hold(method, mark, seconds=LONG_S):
    """Return a function that makes a method of an operator touch a file and then sleep."""

    def replace(operator):
        original = getattr(operator, method)

        def wait(*arguments, **named):
            mark.touch()
            time.sleep(seconds)
            return original(*arguments, **named)

        setattr(operator, method, wait)

    return replace


def check_that_shutdown_ends(call, trainer, source, is_time, num_cpus):
    """Check that shutdown soon ends a call with an error and releases the CPUs.

    Args:
        call: calls a method of the trainer.
        trainer: the trainer.
        source: one of the functions below, which shuts the trainer down.
        is_time: returns whether the call has reached the point of the shutdown.
        num_cpus: number of CPUs that the trainer releases.
    """
    import ray

    began = []

    def num_free():
        return ray.available_resources().get("CPU", 0)

    # After a replacement, Ray counts late.
    wait_until(lambda: num_free() <= ray.cluster_resources()["CPU"] - num_cpus)
    expected = num_free() + num_cpus

    def shut_down(*_):
        began.append(time.monotonic())
        trainer.shutdown()
        assert num_free() == expected

    with pytest.raises(RuntimeError, match=r"shut down|no workers"):
        source(call, shut_down, is_time)
    assert time.monotonic() - began[0] < SOON_S < LONG_S
    assert num_free() == expected


def by_thread(call, shut_down, is_time):
    """Shut down in this thread while another thread makes the call."""
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call)
        wait_until(is_time)
        shut_down()
        calling.result()


def by_timer(call, shut_down, is_time):
    """Shut down in the thread of a timer."""

    def shut_down_in_time():
        wait_until(is_time)
        shut_down()

    timer = threading.Timer(0.0, shut_down_in_time)
    timer.start()
    try:
        call()
    finally:
        timer.join()


def by_signal(call, shut_down, is_time):
    """Shut down in a signal handler that interrupts the call."""
    before = signal.signal(signal.SIGUSR1, shut_down)
    try:
        by_timer(call, lambda: os.kill(os.getpid(), signal.SIGUSR1), is_time)
    finally:
        signal.signal(signal.SIGUSR1, before)


def by_coroutine(call, shut_down, is_time):
    """Shut down in the event loop while another thread makes the call."""

    async def main():
        calling = asyncio.create_task(asyncio.to_thread(call))
        while not (is_time() or calling.done()):
            await asyncio.sleep(0.01)
        shut_down()
        await calling

    asyncio.run(main())
