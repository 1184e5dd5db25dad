"""The iterator that ``Trainer.run_iterator`` returns."""

from __future__ import annotations

import inspect
from collections.abc import Generator
from typing import Any

from raysgd.train.executor import BackendExecutor

__all__ = ["TrainingIterator"]


class TrainingIterator:
    """Yields the reports of all workers: a list of dicts, by rank."""

    def __init__(self, executor: BackendExecutor) -> None:
        self._executor = executor
        self._results: list[Any] | None = None
        self._replaced = False
        self._reports = self._generate()

    def _generate(self) -> Generator[list[dict[str, Any]]]:
        while (reports := self._executor.fetch_next_result()) is not None:
            yield reports
        self._results = self._executor.finish_training()

    def __iter__(self) -> TrainingIterator:
        return self

    def __next__(self) -> list[dict[str, Any]]:
        """Wait for the next reports.

        Raises:
            StopIteration: if the function has returned on all workers.
            RuntimeError: if another run of the trainer has ended this one.
            BaseException: the exception of the function.
        """
        if self._replaced:
            raise RuntimeError(
                "Another run of the trainer has ended the run of this iterator. Finish an iterator "
                "first, or call get_final_results(force=True)."
            )
        return next(self._reports)

    def is_finished(self) -> bool:
        """Return whether the run has ended, with or without an error."""
        return inspect.getgeneratorstate(self._reports) == inspect.GEN_CLOSED

    def get_final_results(self, force: bool = False) -> list[Any] | None:
        """Return the results of the function by rank; None before the run has finished.

        Args:
            force: whether to finish the run now and skip further reports.
        """
        if force and not self.is_finished():
            self._reports.close()
            self._results = self._executor.finish_training()
        return self._results

    def abandon(self) -> None:
        """End the run.

        Raises:
            ValueError: if another thread is waiting for the next reports.
        """
        if not self.is_finished():
            self._reports.close()
            self._executor.abort()
            self._replaced = True
