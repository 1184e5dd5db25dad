"""The read-only properties of a trainer: settings, workers, progress, and metrics."""

from pathlib import Path
from typing import Any

from raysgd._internal.forwarding import forward_to
from raysgd.callbacks.base import CallInfo
from raysgd.driver.dispatcher import Dispatcher
from raysgd.driver.result_reporter import ResultReporter
from raysgd.driver.state_transfer import StateTransfer
from raysgd.elastic.controller import Controller
from raysgd.elastic.events import Event
from raysgd.elastic.speed import SpeedReport
from raysgd.loop.options import Options


def option_property(name: str) -> Any:
    """Return a property of trainers: an argument of the constructor."""
    return forward_to(f"_options.{name}", "The argument of the constructor.")


class TrainerProperties:
    """The read-only properties of a trainer."""

    _options: Options
    _controller: Controller
    _dispatcher: Dispatcher
    _reporter: ResultReporter
    _transfer: StateTransfer

    @property
    def config(self) -> dict[str, Any]:
        """The config. ``BATCH_SIZE`` is rounded down to a multiple of the maximum workers.

        If workers read their own batches, a smaller group rounds the global batch down again.
        """
        return dict(self._options.config)

    @property
    def num_workers(self) -> int:
        """The current number of workers."""
        return len(self._controller.members)

    use_local = option_property("use_local")
    use_tqdm = option_property("use_tqdm")
    add_dist_sampler = option_property("add_dist_sampler")
    timeout_s = option_property("timeout_s")
    num_cpus_per_worker = option_property("num_cpus_per_worker")
    min_workers = option_property("min_workers")
    max_workers = option_property("num_workers")
    backend = option_property("backend")
    use_fp16 = option_property("use_fp16")
    use_gpu: bool = forward_to("_options.use_gpu", "Whether workers use GPUs.")
    operator_name: str = forward_to(
        "_options.training_operator_cls.__qualname__", "Name of the class of the operator."
    )
    logdir: Path | None = forward_to("_logdir", "The run folder.")
    epoch: int = forward_to(
        "_reporter.epoch",
        "The current or just finished epoch, counted from 1. 0 before the first epoch.",
    )
    num_completed_epochs: int = forward_to(
        "_reporter.num_completed_epochs", "Number of epochs that were trained to their end."
    )
    global_step: int = forward_to(
        "_reporter.position.global_step", "Finished training steps of all calls."
    )
    num_splits: int = forward_to(
        "_controller.record.newest_status.updates.num_splits",
        "Micro-batches per batch, above 1 after memory ran out.",
    )
    latest_metrics: dict[str, Any] = forward_to(
        "_reporter.metrics", "The newest metrics of `train` and `validate`, in one dict."
    )
    last_call: CallInfo | None = forward_to(
        "_reporter.last_call", "Kind, end time, and duration of the newest `train` or `validate`."
    )
    is_fitting: bool = forward_to("_reporter.is_fitting", "Whether `fit` runs.")
    num_epochs: int | None = forward_to(
        "_reporter.fit_arguments.num_epochs", "Number of epochs at which `fit` ends, or None."
    )
    is_validation_due = forward_to("_reporter.is_validation_due", "Whether `fit` validates next.")
    stop_reason: str | None = forward_to(
        "_dispatcher.stop_reason", "The first reason passed to `request_stop` since `fit` began."
    )

    @property
    def has_trained(self) -> bool:
        """Whether training has begun, here or before the loaded state."""
        return self.epoch > 0 or self._dispatcher.newest_train_request is not None

    @property
    def is_epoch_result_due(self) -> bool:
        """Whether `on_epoch_result` follows `on_epoch_end`: no validation, and no outer hook."""
        return not (self.is_validation_due or self._dispatcher.callback_list.running_hooks[1:])

    @property
    def events(self) -> list[Event]:
        """Events of the group of workers, such as losses and resizes, oldest first."""
        return list(self._controller.events)

    def speed(self) -> SpeedReport:
        """Return where the time of training goes: a table, and a sentence if something is slow.

        The measurement begins again when the group of workers changes.
        """
        return self._controller.speed.report()

    @property
    def provenance(self) -> dict[str, Any]:
        """Where the state comes from, as far as the driver knows it: see `save`."""
        return {**self._transfer.provenance}
