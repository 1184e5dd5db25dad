"""Writing in the background: one write at a time in a thread, while training continues."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from raysgd.errors import CheckpointError

__all__ = ["BackgroundWriter"]

logger = logging.getLogger(__name__)

_NICENESS = 15
"""The niceness of Ray workers. Training has priority over writes in the background."""


class BackgroundWriter:
    """Does one write at a time in a thread, which ends with the write.

    The interpreter waits for the thread when the script ends, so that no accepted write is lost.
    A failure is logged, and the next call raises it.
    """

    def __init__(self) -> None:
        self._write: Future[Any] | None = None
        self._path = ""

    def submit(self, write: Callable[[], Any], path: str) -> None:
        """Call `write` in the background, after the write before it has ended.

        Args:
            write: writes the checkpoint. No other code may change the state that it uses.
            path: where it writes to, for messages.

        Raises:
            CheckpointError: if the write before it failed; `write` is not called then.
        """
        self.wait()
        self._path = path
        executor = ThreadPoolExecutor(1, "raysgd-checkpoint-writer", _lower_priority)
        self._write = executor.submit(write)
        self._write.add_done_callback(_log_failure)
        executor.shutdown(wait=False)

    def wait(self) -> None:
        """Wait until the write has ended.

        Raises:
            CheckpointError: if it failed.
        """
        error = None if self._write is None else self._write.exception()
        self._write = None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(f"Cannot save to {self._path}: {error!r}") from error

    def raise_failure(self) -> None:
        """Raise the failure of a write that has ended, once; does not wait.

        Raises:
            CheckpointError: if it failed.
        """
        if self._write is not None and self._write.done():
            self.wait()


def _lower_priority() -> None:
    with contextlib.suppress(OSError, AttributeError):  # not every system has threads with it
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _log_failure(write: Future[Any]) -> None:
    if (error := write.exception()) is not None:
        logger.error("A checkpoint was not written: %s", error)
