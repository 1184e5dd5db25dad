"""The base classes of callbacks, and helpers of loggers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from raysgd._internal.values import numbers_in
from raysgd._internal.worker_status import BatchProgress
from raysgd.checkpoint.location import Location
from raysgd.elastic.events import Event
from raysgd.metrics import BATCH_COUNT, NUM_SAMPLES

COUNTS, _MAX_ROWS = ("epoch", NUM_SAMPLES, BATCH_COUNT), 5

AnyTrainer = Any
"""An `OperatorTrainer`, whose module imports this one. Users may annotate a `TorchTrainer`."""


class CallInfo(NamedTuple):
    """A call of ``train()`` or ``validate()`` that returned, or the steps before a log."""

    kind: str
    """``train`` or ``validate``; in `Callback.on_log` it is ``step``."""
    time: float
    """When the call or the steps ended, in seconds since the Unix epoch."""
    seconds: float
    """Duration in seconds, without the time in callbacks."""
    speed: Mapping[str, Sequence[float]] = {}
    """Mean seconds per step by rank for each phase (``data_s``, ...), and ``samples_per_s``."""
    epoch_samples: int = 0
    """Samples of an epoch of training, of which lost workers report none; 0 if unknown."""
    is_complete: bool = True
    """For ``validate``: whether the metrics are of the whole loader."""


class Callback:
    """Observes a trainer from the driver, and can ask it to stop. Override what you need.

    The thread that called the trainer, an `OperatorTrainer`, calls the hooks, in this order
    (see ``docs/callbacks.md``)::

        on_train_start
            on_log                         at the steps of fit(log_every=...)
            on_pause                       at the steps that next_pause returned
            on_epoch_end or on_partial_epoch_end   once for each train()
            on_validation_end              once for each validate()
            on_epoch_result                once for each epoch of fit(), after its validation
            on_event                       at each event of the group of workers
            on_exception                   when train(), validate() or fit() raises
        on_train_end

    With ``use_local=True`` and one worker, this thread trains. Another thread then calls `on_log`
    and `on_progress` during training, and never at the same time as another hook.

    If a callback raises, the others are still called, and no step is lost. Then the call raises a
    :class:`raysgd.errors.CallbackError` that names the callback and the hook.
    """

    order: ClassVar[int] = 0
    """Order of the hooks: lower numbers come first, except in `on_train_start`. Callbacks that add
    metrics have -1, callbacks that save have 1."""
    needs_logdir: bool = False
    """Whether the trainer must have a ``logdir``."""
    monitor: str | None = None
    """Name of a required metric. ``fit()`` raises early if validation does not return it."""
    saves_state: bool = False
    """Whether `on_pause` saves the state. If True, `on_pause` is also called before the preemption
    of workers that cannot be replaced, and at the end of a ``train()`` after its result."""
    stops_at_nan: bool = False
    """Whether ``train()`` ends in a step whose loss is not finite, and logs no warning."""

    def save_location(self, logdir: Path | None) -> Location | None:
        """Return the folder of a trainer in which only this callback may save, or None."""
        return None

    def _forget_run(self) -> None:
        """Forget the earlier run, because a loaded state or a new trainer has nothing of it."""

    def on_train_start(self, trainer: AnyTrainer) -> None:
        """Handle the start of ``fit()``, or else of the first ``train()`` or ``validate()``."""

    def on_train_end(self, trainer: AnyTrainer) -> None:
        """Handle the end of the ``fit()`` that started the callback, or the end of the trainer."""

    def on_epoch_end(self, trainer: AnyTrainer, metrics: dict[str, Any]) -> None:
        """Handle the result of a ``train()`` that completed an epoch.

        Later callbacks and the caller see metrics that you add to `metrics`.
        """

    def on_partial_epoch_end(self, trainer: AnyTrainer, metrics: dict[str, Any]) -> None:
        """Handle the result of a ``train()`` that ended within an epoch.

        In ``fit()``, only ``max_steps`` ends an epoch early.
        """

    def on_validation_end(self, trainer: AnyTrainer, metrics: dict[str, Any]) -> None:
        """Handle the result of a ``validate()``."""

    def on_epoch_result(self, trainer: AnyTrainer, call: CallInfo, metrics: dict[str, Any]) -> None:
        """Handle the result of an epoch: of training and, if ``fit()`` validates it, of both.

        Outside of ``fit()``, each ``train()`` that completes an epoch has a result, and the first
        complete ``validate()`` after training has another one.

        Args:
            trainer: the trainer.
            call: the newest of these calls, with the duration of both.
            metrics: of both. A metric that validations have is never that of training.
        """

    def on_log(self, trainer: AnyTrainer, call: CallInfo, metrics: dict[str, Any]) -> None:
        """Handle the metrics of the steps since the last call of this hook in the epoch.

        The workers continue to train, so this comes up to about a second late. You cannot call
        them here, as in `on_event`.

        Args:
            trainer: the trainer, whose ``epoch`` and ``global_step`` are those of the log.
            call: of kind ``step``, with the duration of these steps and the present time.
            metrics: the same metrics as from ``train()``, for these steps.
        """

    def on_event(self, trainer: AnyTrainer, event: Event) -> None:
        """Handle an event, once, during a call. Workers may be waiting, so be quick.

        You cannot call the workers here, for example by ``save`` or ``train``. Do that in the next
        `on_epoch_end`. The next start brings the events since the last end.
        """

    def on_exception(self, trainer: AnyTrainer, error: BaseException) -> None:
        """Handle an exception of ``train()``, ``validate()`` or ``fit()``, including Ctrl-C."""

    def next_pause(self, global_step: int) -> int | None:
        """Return the step above `global_step` at which to call `on_pause` next; None for never."""
        return None

    def on_pause(self, trainer: AnyTrainer) -> None:
        """Handle a pause of all workers within an epoch, at the step that `next_pause` returned.

        You can read and save the state. ``train``, ``validate`` and ``load_state_dict`` raise.
        """

    def on_progress(
        self, trainer: AnyTrainer, kind: str, progress: Sequence[BatchProgress]
    ) -> None:
        """Handle the progress of workers, several times per second during a call.

        Args:
            trainer: the trainer.
            kind: ``train`` or ``validate``.
            progress: of the workers that answered; empty when the call begins.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return a state of numbers, strings, lists, and dicts. The trainer saves it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the output of `state_dict`, possibly before `on_train_start`.

        If this raises, the trainer loads nothing and calls this method again with the earlier
        state.
        """


class LoggerCallback(Callback):
    """Writes the result of each call. Override `log`, and hooks such as `on_event`."""

    def log(self, trainer: AnyTrainer, call: CallInfo, metrics: dict[str, Any]) -> None:
        """Write the result of ``train()``, ``validate()``, or some steps: see ``call.kind``."""

    def on_epoch_end(self, trainer: AnyTrainer, metrics: dict[str, Any]) -> None:
        self.log(trainer, trainer.last_call, metrics)

    on_partial_epoch_end = on_validation_end = on_epoch_end

    def on_log(self, trainer: AnyTrainer, call: CallInfo, metrics: dict[str, Any]) -> None:
        self.log(trainer, call, metrics)


def logdir_of(trainer: AnyTrainer) -> Path:
    """Return the run folder of a trainer that has one, because of `needs_logdir`."""
    folder: Path = trainer.logdir
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def means_in(metrics: Mapping[str, Any]) -> dict[str, float | int]:
    """Return the numbers in metrics, without counts, newest values, and the profile."""
    return {
        name: value
        for name, value in numbers_in(metrics).items()
        if name not in COUNTS and not name.startswith(("last_", "profile/"))
    }


class History(list[dict[str, Any]]):
    """The result of ``fit()``: one dict per epoch, with the metrics of training and validation.

    If both have a metric of the same name (``num_samples``), the dict has the metric of training.
    """

    stop_reason: str | None = None
    """Why ``fit()`` ended, such as ``num_epochs=2 is reached``."""

    def __repr__(self) -> str:
        """Return a table of the numbers of the first and the last epochs, without counts."""
        rows = [means_in(metrics) for metrics in self]
        names = dict.fromkeys(name for row in rows for name in row)
        shown = [["epoch", *names]]
        for number, row in enumerate(rows, start=1):
            values = (f"{row[name]:.4g}" if name in row else "" for name in names)
            shown.append([str(self[number - 1].get("epoch", number)), *values])
        if len(rows) > 2 * _MAX_ROWS:
            shown[_MAX_ROWS + 1 : -_MAX_ROWS] = [["…"] * len(shown[0])]
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        lines = ("  ".join(map(str.rjust, row, widths)) for row in shown)
        return "\n".join([*lines, *filter(None, [self.stop_reason])])
