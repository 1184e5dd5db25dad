"""Shutting a trainer down in the midst of a call, from wherever that may come."""

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
    """Return a function that lets a method of an operator touch a file, and then take so long."""

    def replace(operator):
        original = getattr(operator, method)

        def wait(*arguments, **named):
            mark.touch()
            time.sleep(seconds)
            return original(*arguments, **named)

        setattr(operator, method, wait)

    return replace


def check_that_shutdown_ends(call, trainer, source, is_time, num_cpus):
    """Check that a call ends soon, by an error of its own, with all room given back.

    Args:
        call: a call of a trainer.
        trainer: the trainer.
        source: from where to shut it down, one of the functions below.
        is_time: says whether the call is where it is to be ended.
        num_cpus: how many CPUs it gives back.
    """
    import ray

    began = []

    def num_free():
        return ray.available_resources().get("CPU", 0)

    expected = num_free() + num_cpus

    def shut_down(*_):
        began.append(time.monotonic())
        trainer.shutdown()
        assert num_free() == expected

    with pytest.raises(RuntimeError, match=r"shut down|no workers"):
        source(call, shut_down, is_time)
    assert time.monotonic() - began[0] < SOON_S
    assert num_free() == expected


def by_thread(call, shut_down, is_time):
    """In this thread, while another one makes the call."""
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call)
        wait_until(is_time)
        shut_down()
        calling.result()


def by_timer(call, shut_down, is_time):
    """In a thread of a timer's."""

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
    """In a signal handler, in the midst of the call."""
    before = signal.signal(signal.SIGUSR1, shut_down)
    try:
        by_timer(call, lambda: os.kill(os.getpid(), signal.SIGUSR1), is_time)
    finally:
        signal.signal(signal.SIGUSR1, before)


def by_coroutine(call, shut_down, is_time):
    """In asyncio's thread, while another one makes the call."""

    async def main():
        calling = asyncio.create_task(asyncio.to_thread(call))
        while not is_time():
            await asyncio.sleep(0.01)
        shut_down()
        await calling

    asyncio.run(main())
