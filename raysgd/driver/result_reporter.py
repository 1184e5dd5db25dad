"""The results of a trainer's calls, and which validations of ``fit()`` are missing."""

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from raysgd._internal.arguments import as_dict, as_int, set_fields
from raysgd._internal.files import append_lines
from raysgd._internal.nonfinite import nonfinite_loss
from raysgd._internal.values import flatten_scalars
from raysgd._internal.worker_status import ReportedPosition
from raysgd.callbacks.base import CallInfo, logdir_of
from raysgd.callbacks.callback_list import CallbackList
from raysgd.cluster.serialization import PackedValue
from raysgd.elastic.call import WorkerPoint
from raysgd.elastic.controller import Controller
from raysgd.metrics import BATCH_COUNT, NUM_SAMPLES, merge_worker_metrics, with_epoch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FitArguments:
    """See :meth:`raysgd.TorchTrainer.fit`. The defaults mean that no ``fit()`` runs."""

    num_epochs: int | None = None
    validate_every: int | None = None
    max_retries: int = 0
    info: dict[str, Any] | None = None
    log_every: int | None = None
    max_steps: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_epochs", "validate_every", "max_steps", "log_every"):
            if (value := getattr(self, name)) is not None:
                set_fields(self, **{name: as_int("fit", name, value, 1)})
        set_fields(self, max_retries=as_int("fit", "max_retries", self.max_retries, 0))
        as_dict("fit", "info", self.info)


class MergedResult(NamedTuple):
    """The merged metrics of a call of train or validate."""

    worker_metrics: list[dict[str, Any]]
    """Metrics with their weights by rank, then those of workers that have left."""
    metrics: dict[str, Any]
    last_call: CallInfo
    epoch: int | None = None
    """The epoch that was trained; None for validate."""

    @property
    def by_worker(self) -> list[dict[str, Any]]:
        results = [merge_worker_metrics([each], raises=False) for each in self.worker_metrics]
        return results if self.epoch is None else [with_epoch(self.epoch, each) for each in results]


@dataclass(eq=False)
class ResultReporter:
    """Merges the results of calls, keeps the newest ones, and passes them to callbacks.

    Callbacks receive the result of each call of train and validate, and for each epoch a result
    with the metrics of its training, and of the validation after it.
    """

    controller: Controller
    callback_list: CallbackList
    is_fitting: bool = False
    fit_arguments: FitArguments = field(default_factory=FitArguments)
    """The arguments of the running ``fit()``."""
    latest_metrics: dict[str, Any] = field(default_factory=dict)
    """The newest metrics of train and validate."""
    last_call: CallInfo | None = None
    bad_steps: list[dict[str, Any]] = field(default_factory=list)
    """Steps that were not applied, oldest first."""
    has_nonfinite_loss: bool = False
    """Whether the newest metrics had a loss that is not finite."""
    validation_offset: int = 0
    """Where the next validation begins, or the unfinished one began."""
    validation_names: set[str] | None = None
    """Names of the metrics of validations. None: ``fit()`` tries one on a few batches."""
    _log_position: ReportedPosition | None = None
    """Where the workers were at the point that `on_log` receives."""
    _metrics_in_hook: dict[str, Any] = field(default_factory=dict)
    _training: MergedResult | None = None
    """The newest training, until it is reported with a validation."""
    _validation: MergedResult | None = None
    """The first complete validation after this training."""
    _num_validated_epochs: int = 0
    """Number of epochs that need no validation anymore."""
    _due_step: int | None = None
    """Step at which a validation was missing when a ``fit()`` ended or a state was saved."""

    @property
    def position(self) -> ReportedPosition:
        """The position of the group, or in `on_log` that of the point."""
        return self._log_position or self.controller.record.newest_status.position

    @property
    def num_completed_epochs(self) -> int:
        return self.position.num_completed_epochs

    @property
    def epoch(self) -> int:
        """The current or just finished epoch, counted from 1. 0 before the first epoch."""
        return self.num_completed_epochs + self.position.in_epoch

    @property
    def metrics(self) -> dict[str, Any]:
        """The newest metrics, including metrics that callbacks are handling now."""
        return {**self.latest_metrics, **self._metrics_in_hook}

    # ---- reports

    def report_points(self, points: Sequence[WorkerPoint]) -> None:
        """Pass the metrics of a step of ``fit(log_every=...)`` to callbacks."""
        if not (packed := [point.metrics for _, point in points if point.metrics is not None]):
            return
        newest, timing = points[-1][1], dict(points)
        members = [member for member in self.controller.members if member in timing]
        speed = self.controller.speed.end_interval("step", {m: timing[m].timing for m in members})
        call = CallInfo("step", time.time(), max(point.seconds for _, point in points), speed)
        self._log_position = ReportedPosition(
            newest.num_completed_epochs, newest.in_epoch, newest.global_step
        )
        try:
            measured = [each.unpack() if isinstance(each, PackedValue) else each for each in packed]
            merged = self._merge(measured, raises=False)  # a few steps may not suffice
            metrics = {name: each for name, each in merged.items() if not name.startswith("last_")}
            self.callback_list.call_hook("on_log", call, metrics)
        finally:
            self._log_position = None

    def report_bad_steps(self) -> None:
        """Keep, write, and report the steps of a call that were not applied."""
        newest = max((each["step"] for each in self.bad_steps), default=0)
        bad_steps = self.controller.record.newest_status.updates.bad_steps
        if not (new_steps := [each for each in bad_steps if each["step"] > newest]):
            return
        self.bad_steps += new_steps
        if (trainer := self.callback_list.trainer).logdir is not None:
            append_lines(logdir_of(trainer) / "bad_steps.jsonl", new_steps)
        logger.warning(
            "Bad steps that were not applied: %(number)d. The newest is step %(step)d, because "
            "%(reason)s. trainer.bad_steps has their samples.",
            {"number": len(new_steps), **new_steps[-1]},
        )

    def _merge(self, results: list[Any], raises: bool = True) -> dict[str, Any]:
        """Return the merged metrics, and warn once of a loss that is not finite."""
        merged = merge_worker_metrics(results, raises)
        stops_at_nan = any(callback.stops_at_nan for callback in self.callback_list)
        if (bad := nonfinite_loss(merged)) and not (self.has_nonfinite_loss or stops_at_nan):
            logger.warning(
                "%s by step %d. The weights may be lost. callbacks=[TerminateOnNaN()] stops at "
                "the first such step. A CheckpointCallback keeps the last finite state.",
                bad,
                self.position.global_step,
            )
        self.has_nonfinite_loss = bool(bad)
        return merged

    def _report(self, hook: str, result: MergedResult) -> None:
        """Pass the metrics of a call to the callbacks, which may add metrics."""
        self.last_call, metrics = result.last_call, result.metrics
        before, self._metrics_in_hook = self._metrics_in_hook, metrics
        try:
            self.callback_list.call_hook(hook, metrics)
        finally:
            self._metrics_in_hook = before
            self.latest_metrics.update(metrics)

    def report_training(
        self, answers: list[Any], last_call: CallInfo, start: ReportedPosition
    ) -> MergedResult:
        """Merge the metrics of a call of train that began at `start`, and report the result."""
        merged = with_epoch(self.epoch, self._merge(answers))
        result = MergedResult(answers, merged, last_call, self.epoch)
        has_steps = any(answers) or self.position.global_step > start.global_step
        if start.in_epoch and not has_steps:  # the epoch had no batch left, and has only ended
            self.restore_due_validation({})
            return result
        self._training, self._validation = result, None
        has_completed_epoch = self.num_completed_epochs > start.num_completed_epochs
        try:
            self._report("on_epoch_end" if has_completed_epoch else "on_partial_epoch_end", result)
        finally:  # also after Ctrl-C in a callback
            if has_completed_epoch and not self.is_validation_due:
                self._report_epoch()
        self.callback_list.notify_pause()  # of those that save
        return result

    def report_validation(self, answers: list[Any], last_call: CallInfo) -> MergedResult:
        """Merge the metrics of a call of validate, and report the result."""
        result = MergedResult(answers, self._merge(answers), last_call)
        if last_call.is_complete and self._training is not None:
            self._validation = result
        try:
            self._report("on_validation_end", result)
        finally:  # also after Ctrl-C in a callback
            self.validation_names = {*(self.validation_names or ()), *result.metrics}
            if last_call.is_complete:  # after the hook: a state it saves lacks `on_epoch_result`
                self._due_step, self._num_validated_epochs = None, self.num_completed_epochs
            if self._validation is not None:
                self._report_epoch()
        return result

    def _report_epoch(self) -> None:
        """Pass the result of an epoch to callbacks, unless one made the call or loaded a state."""
        training, validation = self._training, self._validation
        if self.callback_list.running_hooks or training is None:
            return
        metrics, call = training.metrics, training.last_call
        if validation is None:
            names = (self.validation_names or set()) - {NUM_SAMPLES, BATCH_COUNT}
            metrics = {name: value for name, value in metrics.items() if name not in names}
        else:
            metrics = {**metrics, **validation.metrics}
            seconds = call.seconds + validation.last_call.seconds
            call = validation.last_call._replace(seconds=seconds)
            self._training = self._validation = None
        self.callback_list.call_hook("on_epoch_result", call, metrics)

    # ---- missing validations

    @contextmanager
    def within_fit(self, arguments: FitArguments) -> Iterator[None]:
        self.is_fitting, self.fit_arguments = True, arguments
        self._num_validated_epochs = self.num_completed_epochs
        try:
            yield
        finally:
            step = self.position.global_step
            self._due_step = step if self.lacks_validation else None
            self.is_fitting, self.fit_arguments = False, FitArguments()

    @property
    def has_all_epochs(self) -> bool:
        """Whether the number of epochs of the running ``fit()`` is reached."""
        return self.num_completed_epochs >= (self.fit_arguments.num_epochs or math.inf)

    @property
    def is_validation_due(self) -> bool:
        """Whether ``fit()`` validates after the newest completed epoch."""
        every, done = self.fit_arguments.validate_every, self.num_completed_epochs
        return bool(every and (done % every == 0 or self.has_all_epochs))

    @property
    def lacks_validation(self) -> bool:
        """Whether the validation of the newest epoch is missing, and no training followed."""
        if self._due_step == self.position.global_step:
            return True
        return self.num_completed_epochs > self._num_validated_epochs and self.is_validation_due

    def state_dict(self) -> dict[str, Any]:
        """Return the metrics that callbacks need in the next validation, if it is missing."""
        if not self.lacks_validation:
            return {}
        is_newest = self.metrics.get("epoch") == self.num_completed_epochs
        return {"validation_due": flatten_scalars(self.metrics) if is_newest else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what a state has of results, and discard those of another run."""
        self.has_nonfinite_loss, self.validation_offset = False, self.position.validation_offset
        self.bad_steps = [*state.get("bad_steps", {}).get("records", ())]
        self.latest_metrics.update(state.get("validation_due", {}))
        self.restore_due_validation(state.get("validation_due"))

    def restore_due_validation(self, due: dict[str, Any] | None) -> None:
        """Record the metrics of the loaded epoch if its validation is missing, otherwise None."""
        self._due_step = None if due is None else self.position.global_step
        self._num_validated_epochs = self.num_completed_epochs
        call = CallInfo("train", time.time(), 0.0)
        self._training = None if due is None else MergedResult([], due, call)
        self._validation = None
