"""A trace of some steps by the PyTorch profiler on worker 0."""

from __future__ import annotations

import functools
import gzip
import logging
import tempfile
from pathlib import Path
from typing import Any

from raysgd._internal.arguments import check_int
from raysgd.callbacks.base import Callback, Trainer, logdir_of

logger = logging.getLogger(__name__)

_running: list[Any] = []
"""The profiler that runs on this worker; PyTorch supports one at a time."""


class TorchProfiler(Callback):
    """Profiles some training steps on worker 0, once, and writes a trace.

    The trace, such as ``profile/trace-step-00000010.json.gz`` in the ``logdir``, opens in
    https://ui.perfetto.dev and in ``chrome://tracing``. Training pauses before and after the steps.
    If worker 0 is lost during these steps, the trace is lost too.

    Args:
        num_steps: number of steps to profile. Each adds about 100 kB to the trace.
        skip_steps: number of steps before the profiled ones. The first steps are not typical.
        arguments: further arguments of ``torch.profiler.profile``, such as ``record_shapes``.

    Raises:
        ValueError: if a number of steps is out of its range.
    """

    needs_logdir = True

    def __init__(
        self,
        num_steps: int = 10,
        skip_steps: int = 10,
        **arguments: Any,
    ) -> None:
        self._num_steps = check_int("TorchProfiler", "num_steps", num_steps, 1)
        self._skip_steps = check_int("TorchProfiler", "skip_steps", skip_steps, 0)
        self._arguments = arguments
        self._begin_at: int | None = None
        self._end_at: int | None = None
        self.trace: Path | None = None
        """Path of the trace; None before the trace is written."""

    def on_train_start(self, trainer: Trainer) -> None:
        if self.trace is None:
            self._begin_at = trainer.global_step + self._skip_steps
            if self._skip_steps == 0:
                self._begin(trainer)

    def next_pause(self, global_step: int) -> int | None:
        due = self._begin_at if self._end_at is None else self._end_at
        # After the loss of all workers, the due step can be in the past.
        return None if due is None else max(due, global_step + 1)

    def on_pause(self, trainer: Trainer) -> None:
        if self._end_at is None:
            self._begin(trainer)
        else:
            self._end(trainer)

    def on_train_end(self, trainer: Trainer) -> None:
        if self._end_at is not None:
            self._end(trainer)
        self._begin_at = None

    def _begin(self, trainer: Trainer) -> None:
        trainer.apply_all_operators(functools.partial(_start, self._arguments))
        self._end_at = trainer.global_step + self._num_steps

    def _end(self, trainer: Trainer) -> None:
        self._begin_at = self._end_at = None
        packed = trainer.apply_all_operators(_stop)[0]
        if packed is None:
            logger.warning("TorchProfiler wrote no trace, because worker 0 was lost.")
            return
        folder = logdir_of(trainer) / "profile"
        folder.mkdir(exist_ok=True)
        self.trace = folder / f"trace-step-{trainer.global_step:08d}.json.gz"
        self.trace.write_bytes(packed)


def _start(arguments: dict[str, Any], operator: Any) -> None:
    """Start the profiler. Runs on the worker, in the thread that trains."""
    if operator.world_rank == 0:
        from torch.profiler import profile

        _running.append(profile(**arguments))
        _running[0].start()


def _stop(operator: Any) -> bytes | None:
    """Stop the profiler, and return its trace. Runs on the worker."""
    if not _running:
        return None
    profiler = _running.pop()
    profiler.stop()
    return gzip.compress(export_trace(profiler))


def export_trace(profiler: Any) -> bytes:
    """Return the trace of a PyTorch profiler."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return path.read_bytes()
