"""What ``Trainer.run_iterator`` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raysgd.train.executor import BackendExecutor

__all__ = ["TrainingIterator"]


class TrainingIterator:
    """What the workers report, one list of dicts, by rank, at a time."""

    def __init__(self, executor: BackendExecutor) -> None:
        self._executor = executor
        self._results: list[Any] | None = None
        self._failed = False

    def __iter__(self) -> TrainingIterator:
        return self

    def __next__(self) -> list[dict[str, Any]]:
        """Wait for the next reports.

        Raises:
            StopIteration: when the function has returned on all workers.
            BaseException: what it raised.
        """
        if self.is_finished():
            raise StopIteration
        results = self._tried(self._executor.fetch_next_result)
        if results is None:
            self._results = self._tried(self._executor.finish_training)
            raise StopIteration
        found: list[dict[str, Any]] = results
        return found

    def is_finished(self) -> bool:
        """Whether the run is over, well or not."""
        return self._failed or self._results is not None

    def get_final_results(self, force: bool = False) -> list[Any] | None:
        """Return what the function returned, by rank; None before the run is finished.

        Args:
            force: whether to finish it now, passing over what is still reported.
        """
        if force and not self.is_finished():
            self._results = self._tried(self._executor.finish_training)
        return self._results

    def _tried(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except BaseException:
            self._failed = True
            raise
