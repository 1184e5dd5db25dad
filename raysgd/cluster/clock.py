"""The clock of the driver's loop."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

__all__ = ["Clock"]


class Clock:
    """Tells the time and waits. A simulation has its own, whose seconds take no time."""

    def monotonic(self) -> float:
        """Return the seconds of a clock that never goes back."""
        return time.monotonic()

    def time(self) -> float:
        """Return seconds since the epoch."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Wait for some seconds."""
        time.sleep(seconds)

    def wait(self, futures: Iterable[Future[Any]], timeout_s: float) -> set[Future[Any]]:
        """Wait until all futures are done, at most `timeout_s`; return those that are not."""
        return concurrent.futures.wait(set(futures), timeout=timeout_s).not_done

    def queue(self) -> SimpleQueue[Any]:
        """Return a queue whose ``get`` waits by this clock."""
        return SimpleQueue()
