"""What a callback is, and what it sees of the trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from raysgd._internal.context import Progress
from raysgd.elastic.events import Event

__all__ = ["Callback", "History", "LastCall", "Trainer"]


class LastCall(NamedTuple):
    """The newest call of ``train()`` or ``validate()`` that returned."""

    kind: str
    """``train`` or ``validate``; in `Callback.on_log` it is ``step``."""
    time: float
    """When it ended, in seconds since the epoch."""
    seconds: float
    """How long it took, without the time that callbacks took in it."""


class Trainer(Protocol):
    """What a callback may use of the trainer, whichever family it is of."""

    @property
    def config(self) -> dict[str, Any]:
        """The trainer's config."""

    @property
    def operator_name(self) -> str:
        """Name of the operator's class."""

    @property
    def num_workers(self) -> int:
        """Workers there are now."""

    @property
    def max_workers(self) -> int:
        """The most workers."""

    @property
    def min_workers(self) -> int:
        """The fewest workers to train with."""

    @property
    def epoch(self) -> int:
        """The epoch that training is in or has just finished, from 1; 0 before the first."""

    @property
    def global_step(self) -> int:
        """Training steps that are done."""

    @property
    def split(self) -> int:
        """In how many parts batches are trained, since they did not fit into memory."""

    @property
    def events(self) -> list[Event]:
        """What happened to the group of workers."""

    @property
    def latest_metrics(self) -> dict[str, Any]:
        """The newest metrics of ``train`` and ``validate`` in one dict."""

    @property
    def last_call(self) -> LastCall | None:
        """The newest call of ``train`` or ``validate`` that returned."""

    @property
    def logdir(self) -> Path | None:
        """The run folder."""

    @property
    def num_epochs(self) -> int | None:
        """How many epochs the ``fit()`` under way shall complete; None outside of it."""

    @property
    def validation_due(self) -> bool:
        """Whether ``fit()`` is still to validate the newest epoch."""

    @property
    def stop_reason(self) -> str | None:
        """Why ``fit()`` was asked to stop."""

    def request_stop(self, reason: str) -> None:
        """Ask ``fit()`` to end after the epoch."""

    def train(self, num_steps: int | None = None) -> Any:
        """Train for an epoch."""

    def validate(self, num_steps: int | None = None) -> Any:
        """Evaluate."""

    def apply_all_operators(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Call a function with the operator of every worker."""

    def state_dict(self, copy: bool = True) -> dict[str, Any]:
        """Return the state; without a `copy` it must not be written to."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state."""


class Callback:
    """Observes a trainer from the driver, and may ask it to stop. Override what you need.

    Hooks are called on the driver, in the thread that called the trainer. In the order of a
    run (see ``docs/write_callbacks.md``)::

        on_train_start
            on_log                         at the steps that fit(log_every=...) asked for
            on_pause                       at the steps that next_pause asked for
            on_epoch_end or on_steps_end   once for each train()
            on_validation_end              once for each validate()
            on_event                       whenever something happens to the group of workers
            on_exception                   when train(), validate() or fit() raises
        on_train_end

    A callback that raises does not keep the others from being called, and no step is lost: when
    all have run, the call raises a :class:`raysgd.errors.CallbackError` that names the callback
    and the hook.
    """

    stage: ClassVar[int] = 0
    """Callbacks of a higher stage come later in every hook, but first in `on_train_start`; those
    of one stage in the order in which they were given. What adds metrics has -1, what saves 1."""
    needs_logdir: bool = False
    """Whether it writes into the trainer's ``logdir``, so that a trainer without one refuses it."""
    monitor: str | None = None
    """The metric that it cannot do without, if there is one: ``fit()`` refuses one that validation
    lacks before it trains."""
    saves_state: bool = False
    """Whether `on_pause` saves the state: it is called at once where workers are to be taken away
    and none can take over."""

    def on_train_start(self, trainer: Trainer) -> None:
        """Begin. ``fit()`` starts callbacks, else the first ``train()`` or ``validate()`` does."""

    def on_train_end(self, trainer: Trainer) -> None:
        """End, also after an exception: of the ``fit()`` that started it, else of the trainer."""

    def on_epoch_end(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        """See the result of a ``train()`` in which an epoch was completed.

        Args:
            trainer: the trainer.
            metrics: what ``train()`` is about to return. What you add to it reaches the callbacks
                that follow, and the caller.
        """

    def on_steps_end(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        """See the result of a ``train(num_steps=...)`` that ended within an epoch.

        ``fit()`` trains whole epochs, and calls this only at ``max_steps`` or ``max_time_s``.
        """

    def on_validation_end(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        """See the result of a ``validate()``."""

    def on_log(self, trainer: Trainer, call: LastCall, metrics: dict[str, Any]) -> None:
        """See what was measured up to a step that ``fit(log_every=...)`` asked for.

        Args:
            trainer: the trainer, whose workers pause as for `on_pause`.
            call: of kind ``step``, with the seconds since the one before or the epoch began.
            metrics: as of ``train()``, for these steps.
        """

    def on_event(self, trainer: Trainer, event: Event) -> None:
        """See an event, once, as it happens: in the midst of a call, while workers may be waiting.

        Be quick. Calls that need the workers (``save``, ``train``, ...) are refused here; set a
        mark, and make them at the next `on_epoch_end`. Events from before the first
        `on_train_start` follow it at once; those after `on_train_end` are told as well.
        """

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """See what ``train()``, ``validate()`` or ``fit()`` is about to raise, Ctrl-C included."""

    def next_pause(self, global_step: int) -> int | None:
        """Return the step at which `on_pause` shall be called next; None for never.

        Args:
            global_step: steps that are done; what is returned must be above it.
        """
        return None

    def on_pause(self, trainer: Trainer) -> None:
        """Act in mid-epoch, while all workers pause at the step that `next_pause` asked for.

        The state can be read and saved. Calls that would move it (``train``, ``validate``,
        ``load_state_dict``) are refused.
        """

    def on_progress(self, trainer: Trainer, kind: str, progress: Sequence[Progress]) -> None:
        """See how far the workers are, several times a second while a call runs.

        Args:
            trainer: the trainer.
            kind: ``train`` or ``validate``.
            progress: of the workers that answered; empty when the call begins.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what is to be saved with the trainer's state: numbers, texts, lists, dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned. May come before `on_train_start`.

        If it raises, the trainer refuses the state that is being loaded as a whole, and this is
        called once more, with what `state_dict` returned before.
        """


class History(list[dict[str, Any]]):
    """What ``fit()`` measured: one dict an epoch, with the metrics of training and validation.

    Where both have a metric of the same name (``num_samples``), it is that of training.
    """

    stop_reason: str | None = None
    """Why ``fit()`` ended before its last epoch; None if it did not."""


def adds_metrics(callback: Callback) -> bool:
    """Whether a callback of a user's may add metrics, or validate by itself."""
    hooks = (type(callback).on_epoch_end, type(callback).on_validation_end)
    return not all(hook.__module__.startswith("raysgd.") for hook in hooks)
