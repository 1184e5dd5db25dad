"""Callbacks that ask the workers for further metrics, a table of the models, or a trace."""

import functools
import gzip
import logging
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import psutil

from raysgd._internal.arguments import as_int
from raysgd.callbacks.base import AnyTrainer, Callback, logdir_of
from raysgd.errors import WorkerLostError

logger = logging.getLogger(__name__)

_WIDTH = 50
"""Maximum width of a layer's type and arguments, in characters."""
_ROW = f"{{:<20}}  {{:<{_WIDTH}}}  {{:>14}}  {{:>14}}  {{:>10}}"

_profilers: list[Any] = []
"""The profiler that runs on this worker; PyTorch supports one at a time."""


class _MeasuringCallback(Callback):
    order: ClassVar[int] = -1  # run before the loggers

    def measure(self, trainer: AnyTrainer) -> dict[str, float]:
        """Return the metrics to add."""
        raise NotImplementedError

    def on_epoch_end(self, trainer: AnyTrainer, metrics: dict[str, Any]) -> None:
        try:
            metrics.update(self.measure(trainer))
        except WorkerLostError as error:  # the next call repairs the group
            name = type(self).__name__
            logger.warning("%s has no metrics for epoch %d: %s", name, trainer.epoch, error)

    on_partial_epoch_end = on_epoch_end


class DeviceStatsMonitor(_MeasuringCallback):
    """Adds the resource use of the workers' processes to the metrics of training.

    ``memory_mib`` is the largest resident memory of a worker. ``cpu_percent`` is the mean CPU use
    since the last call (100 is one core). ``gpu_memory_mib``, if PyTorch uses GPUs, is the largest
    peak of allocated GPU memory since the last call.
    """

    def measure(self, trainer: AnyTrainer) -> dict[str, float]:
        uses = trainer.apply_all_operators(_resource_use)
        peaks = {
            name: max(each[name] for each in uses)
            for name in ("memory_mib", "gpu_memory_mib")
            if all(name in each for each in uses)
        }
        return {**peaks, "cpu_percent": sum(each["cpu_percent"] for each in uses) / len(uses)}


def _resource_use(operator: Any) -> dict[str, float]:
    """Return the resource use of this process. Runs on the worker."""
    process = _process()
    used = {"memory_mib": process.memory_info().rss / 2**20, "cpu_percent": process.cpu_percent()}
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        used["gpu_memory_mib"] = torch.cuda.max_memory_allocated() / 2**20
        torch.cuda.reset_peak_memory_stats()
    return used


_process = functools.cache(psutil.Process)  # `cpu_percent` needs the time of its last call


class LearningRateMonitor(_MeasuringCallback):
    """Adds the learning rates at the end of each call to the metrics of training.

    The name is ``lr``; with several optimizers ``lr-0``, ``lr-1``; and with several parameter
    groups ``lr/group0``, ``lr/group1``.
    """

    def measure(self, trainer: AnyTrainer) -> dict[str, float]:
        return dict(trainer.apply_all_operators(lambda op: op._learning_rates())[0])


class ModelSummary(Callback):
    """Prints the layers of the models, their parameters and sizes, when training starts."""

    def on_train_start(self, trainer: AnyTrainer) -> None:
        print(trainer.apply_all_operators(_summary)[0], flush=True)


def _summary(operator: Any) -> str:
    """Return a table of an operator's models. Runs on the worker."""
    models = operator._registered_models
    lines: list[str] = []
    if not hasattr(operator, "unwrapped"):  # of Keras
        for model in models:
            model.summary(line_length=100, print_fn=lines.append)
        return "\n".join(lines)
    models = [operator.unwrapped(model) for model in models]  # without DistributedDataParallel
    lines = [_ROW.format("part", "type", "parameters", "trained", "size")]
    for number, model in enumerate(models):
        prefix = f"{number}." if len(models) > 1 else ""
        for name, module in model.named_children():
            text = f"{type(module).__name__}({module.extra_repr()})".removesuffix("()")
            kind = textwrap.shorten(text, _WIDTH, placeholder="…")
            lines.append(_row(f"{prefix}{name}", kind, [module]))
    return "\n".join([*lines, _row("all", "", models)])


def _row(name: str, kind: str, modules: Sequence[Any]) -> str:
    parameters = [parameter for module in modules for parameter in module.parameters()]
    count = sum(p.numel() for p in parameters)
    num_trained = sum(p.numel() for p in parameters if p.requires_grad)
    size = sum(p.nbytes for p in parameters)
    exponent, unit = (10, "KiB") if size < 2**20 else (20, "MiB")
    shown = f"{size / 2**exponent:.1f} {unit}"
    return _ROW.format(name, kind, f"{count:,}", f"{num_trained:,}", shown)


class TorchProfiler(Callback):
    """Profiles some training steps on worker 0, once, and writes a trace.

    The trace, such as ``profile/trace-step-00000010.json.gz`` in the ``logdir``, opens in
    https://ui.perfetto.dev and in ``chrome://tracing``. Training pauses before and after the steps.
    If worker 0 is lost during these steps, the trace is lost too.

    Args:
        num_steps: number of steps to profile. Each adds about 100 kB to the trace.
        skip_first: number of steps before the profiled ones. The first steps are not typical.
        arguments: further arguments of ``torch.profiler.profile``, such as ``record_shapes``.

    Raises:
        ValueError: if a number of steps is out of its range.
    """

    needs_logdir = True

    def __init__(
        self,
        num_steps: int = 10,
        skip_first: int = 10,
        **arguments: Any,
    ) -> None:
        self._num_steps = as_int("TorchProfiler", "num_steps", num_steps, 1)
        self._skip_first = as_int("TorchProfiler", "skip_first", skip_first, 0)
        self._arguments = arguments
        self._first_step: int | None = None
        self._end_step: int | None = None
        self.trace_path: Path | None = None
        """Path of the trace; None before the trace is written."""

    def on_train_start(self, trainer: AnyTrainer) -> None:
        if self.trace_path is None:
            self._first_step = trainer.global_step + self._skip_first
            if self._skip_first == 0:
                self._begin(trainer)

    def next_pause(self, global_step: int) -> int | None:
        due = self._first_step if self._end_step is None else self._end_step
        # After the loss of all workers, the due step can be in the past.
        return None if due is None else max(due, global_step + 1)

    def on_pause(self, trainer: AnyTrainer) -> None:
        if self._end_step is None:
            self._begin(trainer)
        else:
            self._end(trainer)

    def on_train_end(self, trainer: AnyTrainer) -> None:
        if self._end_step is not None:
            self._end(trainer)
        self._first_step = None

    def _begin(self, trainer: AnyTrainer) -> None:
        trainer.apply_all_operators(functools.partial(_start_profiler, self._arguments))
        self._end_step = trainer.global_step + self._num_steps

    def _end(self, trainer: AnyTrainer) -> None:
        self._first_step = self._end_step = None
        if (packed := trainer.apply_all_operators(_stop_profiler)[0]) is None:
            logger.warning("TorchProfiler wrote no trace, because worker 0 was lost.")
            return
        folder = logdir_of(trainer) / "profile"
        folder.mkdir(exist_ok=True)
        self.trace_path = folder / f"trace-step-{trainer.global_step:08d}.json.gz"
        self.trace_path.write_bytes(packed)


def _start_profiler(arguments: dict[str, Any], operator: Any) -> None:
    """Start the profiler. Runs on the worker, in the thread that trains."""
    if operator.world_rank == 0:
        from torch.profiler import profile

        _profilers.append(profile(**arguments))
        _profilers[0].start()


def _stop_profiler(operator: Any) -> bytes | None:
    """Stop the profiler, and return its trace. Runs on the worker."""
    if not _profilers:
        return None
    profiler = _profilers.pop()
    profiler.stop()
    return gzip.compress(export_trace(profiler))


def export_trace(profiler: Any) -> bytes:
    """Return the trace of a PyTorch profiler."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return path.read_bytes()
