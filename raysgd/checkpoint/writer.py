"""Writing behind: one write at a time in a thread, while training goes on."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from raysgd.errors import CheckpointError

__all__ = ["BackgroundWriter"]

logger = logging.getLogger(__name__)

_NICENESS = 15
"""That of Ray's workers: what is written behind does not come before training."""
_MENTION_S = 30.0
"""After how long to say what is waited for."""


class BackgroundWriter:
    """Does one write at a time in a thread, which ends with the write.

    The thread is no daemon: the interpreter waits for it when the script has ended, so a write
    that was accepted is done. A failure that nobody was told of by then is logged.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._path = ""
        self._failures: list[BaseException] = []
        weakref.finalize(self, _log_failures, self._failures)

    def submit(self, write: Callable[[], Any], path: str) -> None:
        """Have `write` called behind, once the write before it is done.

        So no more than one state waits to be written.

        Args:
            write: writes the checkpoint; what it uses must be its own.
            path: where it writes to, for messages.

        Raises:
            CheckpointError: if the write before it failed; `write` is not called then.
        """
        self.wait()
        self._path = path
        failures = self._failures

        def run() -> None:  # without self: a writer that is dropped shall log its failures
            with contextlib.suppress(OSError, AttributeError):  # where threads have no priority
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
            try:
                write()
            except BaseException as error:
                failures.append(error)

        self._thread = threading.Thread(target=run, name="raysgd-checkpoint-writer", daemon=False)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until what was submitted is written.

        Args:
            timeout_s: how long at most, in seconds; None for as long as it takes.

        Raises:
            CheckpointError: if it failed, or takes longer.
        """
        thread, started = self._thread, time.monotonic()
        ends = math.inf if timeout_s is None else started + timeout_s
        while thread is not None:
            thread.join(max(0.0, min(ends - time.monotonic(), _MENTION_S)))
            if not thread.is_alive():
                self._thread = thread = None
            elif time.monotonic() >= ends:
                raise CheckpointError(
                    f"The checkpoint {self._path} is still being written after {timeout_s:g} s."
                )
            else:
                waited_s = time.monotonic() - started
                logger.warning("Waiting for %s to be written, %.0f s now.", self._path, waited_s)
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the failure of a write that has ended, once; does not wait.

        Raises:
            CheckpointError: what that write raised.
        """
        if not self._failures:
            return
        error = self._failures.pop()
        if isinstance(error, CheckpointError):
            raise error
        raise CheckpointError(f"Cannot save to {self._path}: {error!r}") from error


def _log_failures(failures: list[BaseException]) -> None:
    for error in failures:
        logger.error("A checkpoint was not written, and no call followed to say so: %s", error)
