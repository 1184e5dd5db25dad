"""The clock of the driver's control loop."""

import concurrent.futures
import time
from collections.abc import Iterable
from concurrent.futures import ALL_COMPLETED, Future
from typing import Any


class Clock:
    """Reads the time and waits. In simulations, waits return immediately."""

    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)
    time = staticmethod(time.time)

    def wait(
        self, futures: Iterable[Future[Any]], timeout_s: float, until: str = ALL_COMPLETED
    ) -> set[Future[Any]]:
        """Wait for all futures, or for the first one. Return those that are not done."""
        return concurrent.futures.wait(set(futures), timeout_s, until).not_done
