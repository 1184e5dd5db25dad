"""What others ask of a loop while it runs: to stop, or to pause at a step."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["Signal", "StepInterruptedError"]


class StepInterruptedError(Exception):
    """Raised inside a loop when the driver asked the worker to stop."""


class Signal:
    """Set by the thread that answers the driver, and read by the one that trains.

    Nothing is copied from here, so that what is asked holds from the next batch on, and what is
    taken back is as if it had not been asked.
    """

    def __init__(self) -> None:
        self.stop = False
        """Whether the call under way is to raise at its next batch."""
        self.driver_pause: int | None = None
        """Committed steps at which the driver wants all workers to pause; None: at none."""
        self.callback_pause: int | None = None
        """The same of a callback; each call of train sets it when it begins."""
        self._interrupted = False
        self._is_waiting = False

    @property
    def pause(self) -> int | None:
        """Committed steps at which to pause first; None for no pause."""
        pauses = (self.driver_pause, self.callback_pause)
        return min((step for step in pauses if step is not None), default=None)

    def raise_stop(self) -> None:
        """Raise StepInterruptedError if the call is to stop."""
        if self._interrupted:
            signal.raise_signal(signal.SIGINT)  # the second, which is delivered immediately
        if self.stop:
            raise StepInterruptedError("The driver asked this worker to stop.")

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Return a context in which Ctrl-C is delivered immediately: no step is in progress."""
        self._is_waiting = True
        try:
            yield
        finally:
            self._is_waiting = False

    @contextlib.contextmanager
    def deferring_ctrl_c(self) -> Iterator[None]:
        """Return a context that defers Ctrl-C to `raise_stop`, or to the end of the context.

        A second Ctrl-C is delivered immediately.
        """
        deliver = signal.getsignal(signal.SIGINT)
        if not callable(deliver) or threading.current_thread() is not threading.main_thread():
            yield
            return

        def defer(number: int, frame: Any) -> None:
            if self._interrupted or self._is_waiting:
                self._interrupted = False
                deliver(number, frame)
            else:
                self._interrupted = True

        signal.signal(signal.SIGINT, defer)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, deliver)
            interrupted, self._interrupted = self._interrupted, False
        if interrupted:
            signal.raise_signal(signal.SIGINT)
