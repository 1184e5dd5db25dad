"""Telling callbacks about a run, its end included."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from raysgd.train.callbacks.callback import visible

__all__ = ["CallbackHandler"]

logger = logging.getLogger(__name__)

_METHODS = (("start_training",), ("process_results", "handle_result"), ("finish_training",))
"""What a callback has: of each line one."""


class CallbackHandler:
    """The callbacks of one run.

    Raises:
        TypeError: if one is no TrainingCallback, and has not its methods either.
    """

    def __init__(self, callbacks: Sequence[Any] | None) -> None:
        if callbacks is not None and not isinstance(callbacks, Sequence):
            raise TypeError(f"callbacks={callbacks!r}: must be a list of TrainingCallbacks.")
        self._callbacks = list(callbacks or ())
        for callback in self._callbacks:
            is_one = all(any(hasattr(callback, name) for name in names) for names in _METHODS)
            if inspect.isclass(callback) or not is_one:
                raise TypeError(
                    f"callbacks=[{callback!r}]: each must be a TrainingCallback, or have its "
                    "start_training, finish_training, and process_results or handle_result."
                )

    @contextlib.contextmanager
    def run(self, logdir: Path, config: dict[str, Any]) -> Iterator[None]:
        """Tell them that a run begins, and in the end that it is over, and how."""
        begun: list[Any] = []
        failed = True
        try:
            for callback in self._callbacks:
                begun.append(callback)
                callback.start_training(logdir=str(logdir), config=config)
            yield
            failed = False
        finally:
            self._finish(begun, failed)

    def handle(self, results: list[dict[str, Any]]) -> None:
        """Show them what the workers reported; each gets dicts of its own."""
        for callback in self._callbacks:
            own = [dict(result) for result in results]
            if hasattr(callback, "process_results"):
                callback.process_results(own)
            else:  # no relative of ours
                callback.handle_result(visible(callback, own))

    def _finish(self, begun: Sequence[Any], failed: bool) -> None:
        """Tell all of them, also where one raises."""
        raised: BaseException | None = None
        for callback in begun:
            try:
                callback.finish_training(error=failed)
            except Exception as error:
                if raised is None and not failed:
                    raised = error
                else:
                    logger.exception("%s failed as it ended.", type(callback).__name__)
            except BaseException as error:  # Ctrl-C: the others still have files to close
                error.__cause__, raised = raised, error
        if raised is not None:
            raise raised
