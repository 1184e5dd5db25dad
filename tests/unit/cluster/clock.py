"""A clock that a test sets."""

from raysgd.cluster.clock import Clock

__all__ = ["ManualClock"]


class ManualClock(Clock):
    """A clock that only `sleep` and the test advance. `wait` returns immediately."""

    def __init__(self):
        self.now = 500.0
        self.waited = []

    def monotonic(self):
        return self.now

    def time(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def wait(self, futures, timeout_s, until=None):
        self.waited.append(timeout_s)
        return {future for future in futures if not future.done()}
