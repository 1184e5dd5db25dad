"""What a callback of a training function can do."""

from __future__ import annotations

import os
from typing import Any

from raysgd.train.callbacks.preprocessors import ResultsPreprocessor

__all__ = ["TrainingCallback"]


class TrainingCallback:
    """Sees what the workers report. Runs on the driver; override what you need."""

    results_preprocessor: ResultsPreprocessor | None = None
    """Applied to results before `handle_result` gets them."""

    def start_training(
        self, logdir: str | os.PathLike[str], config: dict[str, Any], **info: Any
    ) -> None:
        """Called as a run begins.

        Args:
            logdir: folder of the run.
            config: what the function is given.
            info: for what may be added later.
        """

    def process_results(self, results: list[dict[str, Any]], **info: Any) -> None:
        """Called with what the workers reported, by rank; hands it, preprocessed, on."""
        if self.results_preprocessor is not None:
            results = self.results_preprocessor.preprocess(results)
        self.handle_result(results, **info)

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        """Called with what the workers reported, by rank, after preprocessing."""

    def finish_training(self, error: bool = False, **info: Any) -> None:
        """Called when a run has ended.

        Args:
            error: whether it has failed.
            info: for what may be added later.
        """
