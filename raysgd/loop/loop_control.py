"""Interruptions of a running loop, requests to pause it at a step, and where it failed."""

import contextlib
import math
import signal
import threading
from collections.abc import Iterator
from typing import Any


class StepInterruptedError(Exception):
    """Raised in a loop that the driver has interrupted."""


class LoopControl:
    """Flags that the control thread sets, and the training thread reads before each batch."""

    def __init__(self) -> None:
        self.is_interrupted = False  # the call must raise before its next batch
        self.driver_pause_step = math.inf  # number of committed steps at which to pause
        self._has_deferred_ctrl_c = False
        self._is_reading = False
        self.failure_place = ""  # see `ProcessStatus.failure_place`

    def raise_if_interrupted(self) -> None:
        """Raise StepInterruptedError if the call is interrupted, or deliver a deferred Ctrl-C."""
        if self._has_deferred_ctrl_c:
            signal.raise_signal(signal.SIGINT)  # only the first Ctrl-C is deferred
        if self.is_interrupted:
            raise StepInterruptedError("The driver asked this worker to stop.")

    def next_batch(self, batches: Iterator[Any], *default: Any) -> Any:
        """Return the next batch. Deliver Ctrl-C immediately, because no step is in progress."""
        self._is_reading = True
        try:
            return next(batches, *default)
        finally:
            self._is_reading = False

    @contextlib.contextmanager
    def deferring_ctrl_c(self) -> Iterator[None]:
        """Defer the first Ctrl-C until `raise_if_interrupted` is called or the context ends."""
        deliver = signal.getsignal(signal.SIGINT)
        if not callable(deliver) or threading.current_thread() is not threading.main_thread():
            yield
            return

        def defer(number: int, frame: Any) -> None:
            self._has_deferred_ctrl_c = not (self._has_deferred_ctrl_c or self._is_reading)
            if not self._has_deferred_ctrl_c:
                deliver(number, frame)

        signal.signal(signal.SIGINT, defer)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, deliver)
            has_deferred, self._has_deferred_ctrl_c = self._has_deferred_ctrl_c, False
        if has_deferred:
            signal.raise_signal(signal.SIGINT)
