"""Traces of the PyTorch profiler, from a training function to a folder on the driver."""

import os
from pathlib import Path
from typing import Any

from raysgd.callbacks.measurements import export_trace
from raysgd.train.callbacks.callback import FileCallback
from raysgd.train.constants import PYTORCH_PROFILER_KEY
from raysgd.train.session import world_rank

__all__ = ["TorchTensorboardProfilerCallback"]


class TorchWorkerProfiler:
    """Collects traces in a training function. `TorchTensorboardProfilerCallback` writes them.

    ::

        collector = TorchWorkerProfiler()
        with torch.profiler.profile(on_trace_ready=collector.trace_handler) as profiler:
            ...
            train.report(loss=loss, **collector.get_and_clear_profile_traces())

    `trace_dir` is a folder on the worker's node for copies of the traces.
    """

    def __init__(self, trace_dir: str | os.PathLike[str] | None = None) -> None:
        self._folder = None if trace_dir is None else Path(trace_dir).expanduser()
        self._traces: list[tuple[str, str]] = []

    def trace_handler(self, p: Any) -> None:
        """Collect a trace. Pass this method to the profiler."""
        content = export_trace(p).decode()
        name = f"worker_{world_rank()}_{os.getpid()}.step_{p.step_num}.pt.trace.json"
        self._traces.append((name, content))
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / name).write_text(content, encoding="utf-8")

    def get_and_clear_profile_traces(self) -> dict[str, list[tuple[str, str]]]:
        """Return the traces since the last call, as keyword arguments of ``train.report``."""
        traces, self._traces = self._traces, []
        return {PYTORCH_PROFILER_KEY: traces}


class TorchTensorboardProfilerCallback(FileCallback):
    """Writes the traces that `TorchWorkerProfiler` reports.

    The default folder is ``pytorch_profiler`` in the folder of the run. `workers_to_log=None`
    selects all workers.
    """

    _subfolder = "pytorch_profiler"
    RESERVED_KEYS = (PYTORCH_PROFILER_KEY,)

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        for result in results:
            for name, content in result.get(PYTORCH_PROFILER_KEY, ()):
                (self.logdir / os.path.basename(name)).write_text(content, encoding="utf-8")
