"""What ``Trainer.run_iterator`` returns."""

from __future__ import annotations

import threading
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
        self._abandoned = False
        self._thread = threading.current_thread()

    def __iter__(self) -> TrainingIterator:
        return self

    def __next__(self) -> list[dict[str, Any]]:
        """Wait for the next reports.

        Raises:
            StopIteration: when the function has returned on all workers.
            RuntimeError: if another run was started meanwhile, which has ended this one.
            BaseException: what the function raised.
        """
        if self._abandoned:
            raise RuntimeError(
                "The run of this iterator is over, because another was started on its trainer. Go "
                "through an iterator to its end, or call get_final_results(force=True), first."
            )
        if self.is_finished():
            raise StopIteration
        results: list[dict[str, Any]] | None = self._tried(self._executor.fetch_next_result)
        if results is None:
            self.get_final_results(force=True)
            raise StopIteration
        return results

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

    def abandon(self) -> bool:
        """End the run, unless another thread goes through it.

        Returns:
            Whether the run is over.
        """
        if self.is_finished():
            return True
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            return False
        self._failed = self._abandoned = True
        self._executor.abort()
        return True

    def _tried(self, function: Callable[[], Any]) -> Any:
        self._thread = threading.current_thread()
        try:
            return function()
        except StopIteration as error:  # which would end the loop over the reports, as if all well
            self._failed = True
            raise RuntimeError("The training function raised StopIteration.") from error
        except BaseException:
            self._failed = True
            raise
