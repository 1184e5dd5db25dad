"""Writes traces of the PyTorch profiler."""

from __future__ import annotations

import os
from typing import Any

from raysgd.train.callbacks.callback import FileCallback
from raysgd.train.constants import PYTORCH_PROFILER_KEY

__all__ = ["TorchTensorboardProfilerCallback"]


class TorchTensorboardProfilerCallback(FileCallback):
    """Writes the traces that :class:`raysgd.train.torch.TorchWorkerProfiler` reports.

    The default folder is ``pytorch_profiler`` in the folder of the run. `workers_to_log=None`
    selects all workers.
    """

    _subfolder = "pytorch_profiler"
    RESERVED_KEYS = (PYTORCH_PROFILER_KEY,)

    def __init__(
        self,
        logdir: str | os.PathLike[str] | None = None,
        workers_to_log: int | list[int] | None = None,
    ) -> None:
        super().__init__(logdir, workers_to_log)

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        for result in results:
            for name, content in result.get(PYTORCH_PROFILER_KEY, ()):
                (self.logdir / os.path.basename(name)).write_text(content, encoding="utf-8")
