"""Traces that workers have made with torch's profiler."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from raysgd.train.callbacks.callback import FileCallback

__all__ = ["PROFILE_TRACES", "TorchTensorboardProfilerCallback", "without_traces"]

PROFILE_TRACES = "_train_torch_profiler"
"""Under which name a worker reports its traces: pairs of a file name and the content."""


class TorchTensorboardProfilerCallback(FileCallback):
    """Writes the traces that :class:`raysgd.train.torch.TorchWorkerProfiler` reports.

    Args:
        logdir: the folder; None for ``pytorch_profiler`` in that of the run.
        workers_to_log: ranks of the workers whose traces are written; None for all.
    """

    _subfolder = "pytorch_profiler"

    def __init__(
        self,
        logdir: str | os.PathLike[str] | None = None,
        workers_to_log: int | list[int] | None = None,
    ) -> None:
        super().__init__(logdir, workers_to_log)

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        """Write the traces that have come with a report."""
        for result in results:
            for name, content in result.get(PROFILE_TRACES, ()):
                (self.logdir / os.path.basename(name)).write_text(content, encoding="utf-8")


def without_traces(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was reported but for the profiler's traces, which are long files."""
    return {key: value for key, value in result.items() if key != PROFILE_TRACES}
