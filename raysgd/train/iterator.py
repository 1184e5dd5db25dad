"""The iterator that ``Trainer.run_iterator`` returns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from raysgd.train.executor import BackendExecutor

__all__ = ["TrainingIterator"]


class TrainingIterator:
    """Yields the reports of all workers: a list of dicts, by rank."""

    def __init__(self, executor: BackendExecutor) -> None:
        self._executor = executor
        self._results: list[Any] | None = None
        self._failed = False
        self._abandoned = False
        self._thread = threading.current_thread()

    def __iter__(self) -> TrainingIterator:
        return self

    def __next__(self) -> list[dict[str, Any]]:
        """Wait for the next reports.

        Raises:
            StopIteration: if the function has returned on all workers.
            RuntimeError: if another run of the trainer has ended this one.
            BaseException: the exception of the function.
        """
        if self._abandoned:
            raise RuntimeError(
                "The run of this iterator is over, because another was started on its trainer. Go "
                "through an iterator to its end, or call get_final_results(force=True), first."
            )
        if self.is_finished():
            raise StopIteration
        results: list[dict[str, Any]] | None = self._run(self._executor.fetch_next_result)
        if results is None:
            self.get_final_results(force=True)
            raise StopIteration
        return results

    def is_finished(self) -> bool:
        """Return whether the run has ended, with or without an error."""
        return self._failed or self._results is not None

    def get_final_results(self, force: bool = False) -> list[Any] | None:
        """Return the results of the function by rank; None before the run has finished.

        Args:
            force: whether to finish the run now and skip further reports.
        """
        if force and not self.is_finished():
            self._results = self._run(self._executor.finish_training)
        return self._results

    def abandon(self) -> bool:
        """End the run, unless another thread iterates over it.

        Returns:
            Whether the run has ended.
        """
        if self.is_finished():
            return True
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            return False
        self._failed = self._abandoned = True
        self._executor.abort()
        return True

    def _run(self, function: Callable[[], Any]) -> Any:
        self._thread = threading.current_thread()
        try:
            return function()
        except StopIteration as error:  # would silently end the loop over the reports
            self._failed = True
            raise RuntimeError("The training function raised StopIteration.") from error
        except BaseException:
            self._failed = True
            raise
