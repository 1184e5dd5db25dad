"""Printing results."""

from __future__ import annotations

from typing import Any

from raysgd.train.callbacks.callback import TrainingCallback
from raysgd.train.callbacks.profiler import without_traces

__all__ = ["PrintCallback"]


class PrintCallback(TrainingCallback):
    """Prints what the workers report."""

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        """Print the results, one worker a line."""
        for rank, result in enumerate(results):
            print(
                f"worker {rank}: "
                + ", ".join(f"{k}={v}" for k, v in without_traces(result).items())
            )
