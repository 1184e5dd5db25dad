"""The clock of the driver's control loop."""

import concurrent.futures
import time
from collections.abc import Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any


class Clock:
    """Reads the time and waits. In simulations, waits return immediately."""

    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)
    time = staticmethod(time.time)

    def wait(self, futures: Iterable[Future[Any]], timeout_s: float) -> set[Future[Any]]:
        """Wait for futures, and return those that are not done."""
        return concurrent.futures.wait(set(futures), timeout=timeout_s).not_done

    new_queue = SimpleQueue[Any]
    """Returns a queue whose ``get`` uses this clock for its timeout."""
