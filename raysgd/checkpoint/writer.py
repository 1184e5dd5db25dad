"""Background writes: one at a time, while training continues."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from raysgd.errors import CheckpointError

logger = logging.getLogger(__name__)


class BackgroundWriter:
    """Runs one write at a time, each in its own thread.

    The interpreter waits for the thread at exit, so that no write is lost. An error is logged, and
    the next call raises it.
    """

    def __init__(self) -> None:
        self._write: Future[Any] | None = None
        self._path = ""

    def submit(self, write: Callable[[], Any], path: str) -> None:
        """Call `write` in the background, when the earlier write has ended.

        No other code may change the state that `write` uses. Messages name `path`, the destination.

        Raises:
            CheckpointError: if the earlier write failed. Then `write` is not called.
        """
        self.wait()
        self._path = path
        executor = ThreadPoolExecutor(1, "raysgd-checkpoint-writer")
        self._write = executor.submit(write)
        self._write.add_done_callback(_log_failure)
        executor.shutdown(wait=False)

    def wait(self) -> None:
        """Wait until the write has ended, and raise its error, once, as a CheckpointError."""
        error = None if self._write is None else self._write.exception()
        self._write = None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(f"Cannot save to {self._path}: {error!r}") from error


def _log_failure(write: Future[Any]) -> None:
    if (error := write.exception()) is not None:
        logger.error("Could not write a checkpoint: %s", error)
