"""How long a thread has been in one call."""

import threading
import time

from raysgd.backends.calls import Calls
from tests.conftest import wait_until


def test_a_thread_that_stays_in_one_call_is_told_from_one_that_makes_many():
    calls, over = Calls("threading.py"), threading.Event()
    stays = threading.Thread(target=over.wait)
    stays.start()
    wait_until(lambda: calls.longest_s() > 0.2)
    over.set()
    stays.join()
    assert Calls("no such library").longest_s() == 0.0


def test_calls_one_after_the_other_are_not_one_long_call():
    """They may use the same frame of memory."""
    calls, stop = Calls("threading.py"), threading.Event()

    def wait_again_and_again():
        while not stop.wait(0.005):
            pass

    thread = threading.Thread(target=wait_again_and_again)
    thread.start()
    try:
        began, longest = time.monotonic(), 0.0
        while time.monotonic() - began < 0.3:
            longest = max(longest, calls.longest_s())
            time.sleep(0.01)
    finally:
        stop.set()
        thread.join()
    assert longest < 0.2
