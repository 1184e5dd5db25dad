"""Calls the callbacks of a run."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from raysgd.train.callbacks.callback import TrainingCallback

__all__ = ["CallbackHandler"]

logger = logging.getLogger(__name__)


class CallbackHandler:
    """Calls the callbacks of one run.

    Raises:
        TypeError: if one is not a TrainingCallback.
    """

    def __init__(self, callbacks: Sequence[Any] | None) -> None:
        if not isinstance(callbacks, Sequence | None):
            raise TypeError(f"callbacks={callbacks!r}: must be a list of TrainingCallbacks.")
        self._callbacks = list(callbacks or ())
        for callback in self._callbacks:
            if not isinstance(callback, TrainingCallback):
                raise TypeError(f"callbacks=[{callback!r}]: each must be a TrainingCallback.")

    @contextlib.contextmanager
    def run(self, logdir: Path, config: dict[str, Any]) -> Iterator[None]:
        """Start the callbacks. At the end, finish those that started, in reverse order."""
        with contextlib.ExitStack() as started:
            for callback in self._callbacks:
                started.push(functools.partial(_finish, callback))
                callback.start_training(logdir=str(logdir), config=config)
            yield

    def handle(self, results: list[dict[str, Any]]) -> None:
        """Give each callback its own copy of the results."""
        for callback in self._callbacks:
            callback.process_results([dict(result) for result in results])


def _finish(callback: TrainingCallback, error: type[BaseException] | None, *_: object) -> None:
    try:
        callback.finish_training(error=error is not None)
    except Exception:
        if error is None:
            raise
        logger.exception("%s.finish_training failed.", type(callback).__name__)
