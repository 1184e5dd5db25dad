"""The read-only properties of a trainer: settings, workers, progress, and metrics."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

from raysgd._internal.config import BATCH_SIZE
from raysgd.callbacks.base import LastCall
from raysgd.elastic.controller import Controller
from raysgd.elastic.events import Event
from raysgd.elastic.speed import SpeedReport
from raysgd.loop.options import Options
from raysgd.trainer.dispatcher import Dispatcher
from raysgd.trainer.fit import FitLoop


def argument(name: str) -> Any:
    """Return a property of trainers: an argument of the constructor."""
    return property(operator.attrgetter(f"_options.{name}"), doc="The argument of the constructor.")


class TrainerInfo:
    """The read-only properties of a trainer."""

    _options: Options
    _controller: Controller
    _dispatcher: Dispatcher
    _fit_loop: FitLoop
    _keeps_batch: bool
    _logdir: Path | None

    @property
    def config(self) -> dict[str, Any]:
        """The config, with the global batch of the current workers as ``BATCH_SIZE``.

        The global batch is rounded down to a multiple of the workers: the maximum number, or the
        current number if workers read their own batches.
        """
        config = dict(self._options.config)
        if not self._keeps_batch:
            config[BATCH_SIZE] -= config[BATCH_SIZE] % max(1, self.num_workers)
        return config

    @property
    def num_workers(self) -> int:
        """The current number of workers."""
        return len(self._controller.members)

    use_local = argument("use_local")
    use_tqdm = argument("use_tqdm")
    add_dist_sampler = argument("add_dist_sampler")
    timeout_s = argument("timeout_s")
    num_cpus_per_worker = argument("num_cpus_per_worker")
    min_workers = argument("min_workers")
    max_workers = argument("num_workers")
    backend = argument("backend")
    use_fp16 = argument("use_fp16")

    @property
    def use_gpu(self) -> bool:
        """Whether workers use GPUs."""
        return bool(self._options.use_gpu)

    @property
    def operator_name(self) -> str:
        """Name of the class of the operator."""
        return str(self._options.training_operator_cls.__qualname__)

    @property
    def epoch(self) -> int:
        """The current or just finished epoch, counted from 1. 0 before the first epoch."""
        progress = self._controller.progress
        return progress.epoch + progress.in_epoch

    @property
    def global_step(self) -> int:
        """Finished training steps of all calls."""
        return self._controller.progress.global_step

    @property
    def split(self) -> int:
        """Number of micro-batches per batch, above 1 after memory ran out."""
        return self._controller.progress.split

    @property
    def events(self) -> list[Event]:
        """Events of the group of workers, such as losses and resizes, oldest first."""
        return list(self._controller.events)

    @property
    def latest_metrics(self) -> dict[str, Any]:
        """The newest metrics of `train` and `validate`, merged over workers, in one dict."""
        return self._dispatcher.metrics

    @property
    def last_call(self) -> LastCall | None:
        """Kind, end time, and duration of the newest call of `train` or `validate`."""
        return self._dispatcher.last_call

    def speed(self) -> SpeedReport:
        """Return where the time of training goes: a table, and a sentence if something is slow.

        The measurement begins again when the group of workers or its speed changes.
        """
        return self._controller.speed.report()

    @property
    def logdir(self) -> Path | None:
        """The run folder."""
        return self._logdir

    @property
    def num_epochs(self) -> int | None:
        """The number of epochs at which the current `fit` ends. None outside of `fit`."""
        return self._fit_loop.num_epochs

    @property
    def validation_due(self) -> bool:
        """Whether `fit` has yet to validate the newest epoch."""
        return self._fit_loop.lacks_validation

    @property
    def stop_reason(self) -> str | None:
        """The reason passed to `request_stop`. None if no stop was requested since `fit` began."""
        return self._fit_loop.stop_reason
