"""The loop of ``trainer.fit()``: epochs, validation, and why it ends."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from raysgd._internal.context import Progress
from raysgd.callbacks.base import History, Trainer
from raysgd.callbacks.values import meant, numbers_in

__all__ = ["Limits", "Validations", "check_monitored", "run_epochs"]

logger = logging.getLogger(__name__)

_OF_VALIDATION = ("val", "eval_", "eval/")
"""How names begin that mean a metric of validation."""


class Limits:
    """Where a ``fit()`` ends early, and how much of the data it takes for an epoch.

    Args:
        limit_train_batches: training batches of a worker in an epoch, or a share of them.
        limit_val_batches: the same of a validation.
        overfit_batches: both, and the same training batches in each epoch.
        max_steps: steps of all training after which to end, also in mid-epoch.
        max_time_s: seconds after which to end, also in mid-epoch.

    Raises:
        TypeError: if one is no number.
        ValueError: if one is out of its range, or two contradict each other.
    """

    def __init__(
        self,
        limit_train_batches: float | None = None,
        limit_val_batches: float | None = None,
        overfit_batches: float | None = None,
        max_steps: int | None = None,
        max_time_s: float | None = None,
    ) -> None:
        if overfit_batches is not None and (limit_train_batches or limit_val_batches) is not None:
            raise ValueError(
                "fit() takes overfit_batches, which limits training and validation, or "
                "limit_train_batches and limit_val_batches, not both."
            )
        if max_time_s is not None:
            if isinstance(max_time_s, bool) or not isinstance(max_time_s, int | float):
                raise TypeError(f"fit(max_time_s={max_time_s!r}): must be a number of seconds.")
            if not 0 < max_time_s < math.inf:
                raise ValueError(f"fit(max_time_s={max_time_s!r}): must be above 0, and finite.")
        _check_share("limit_train_batches", limit_train_batches)
        _check_share("limit_val_batches", limit_val_batches)
        _check_share("overfit_batches", overfit_batches)
        self.train_batches = overfit_batches if limit_train_batches is None else limit_train_batches
        """Steps of an epoch, or their share of it; None for all."""
        self.val_batches = overfit_batches if limit_val_batches is None else limit_val_batches
        """Steps of a validation, or their share of it; None for all."""
        self.repeats = overfit_batches is not None
        """Whether each epoch has the batches of the first one."""
        self.max_steps = max_steps
        self._max_time_s = max_time_s
        self._began = time.monotonic()
        self._began_at: int | None = None

    def reached(self, global_step: int) -> str | None:
        """Say which limit is reached; None where none is."""
        if self.max_steps is not None and global_step >= self.max_steps:
            return f"max_steps={self.max_steps} is reached"
        if self._max_time_s is not None and self._left_s() <= 0:
            return f"max_time_s={self._max_time_s:g} is over"
        return None

    def next_look(self, global_step: int) -> int | None:
        """Return the step at which to look at the clock again; None where there is no need."""
        if self._max_time_s is None:
            return None
        if self._began_at is None:
            self._began_at = global_step
        step_s = (time.monotonic() - self._began) / max(1, global_step - self._began_at)
        # in a second, or when the time is over
        steps = min(1.0, self._left_s()) / step_s if global_step > self._began_at else 1
        return global_step + max(1, int(steps))

    def _left_s(self) -> float:
        assert self._max_time_s is not None
        return self._began + self._max_time_s - time.monotonic()


def _check_share(name: str, given: Any) -> None:
    if given is None:
        return
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise TypeError(f"fit({name}={given!r}): must be a number of batches, or a share of them.")
    if given < 1 if isinstance(given, int) else not 0 < given <= 1:
        raise ValueError(
            f"fit({name}={given!r}): must be a number of batches from 1 on, an int, or a share "
            "above 0 and up to 1.0, a float."
        )


class Validations:
    """After which epochs ``fit()`` validates, and whether that of the newest is still to come.

    What is saved at the end of an epoch comes before its validation. A run that goes on from there
    validates first, so that callbacks see the values that they would have seen. So does a ``fit()``
    after one that an exception ended there.

    Args:
        progress: returns how far training has come.
    """

    def __init__(self, progress: Callable[[], Progress]) -> None:
        self._progress = progress
        self._owed_at: int | None = None
        self._num_epochs = 0
        self._every: int | None = None
        self._settled = 0

    @contextlib.contextmanager
    def of_fit(self, num_epochs: int, every: int | None) -> Iterator[None]:
        """Follow the rule of a ``fit()`` while it runs."""
        self._num_epochs, self._every = num_epochs, every
        self._settled = self._progress().epoch
        try:
            yield
        finally:
            self.note_owed(self.missing)
            self._num_epochs, self._every = 0, None

    @property
    def num_epochs(self) -> int | None:
        """How many epochs the ``fit()`` under way shall complete; None outside of it."""
        return self._num_epochs or None

    @property
    def due(self) -> bool:
        """Whether ``fit()`` validates after the newest epoch that is completed."""
        epoch, every = self._progress().epoch, self._every
        return every is not None and (epoch % every == 0 or epoch >= self._num_epochs)

    @property
    def expected(self) -> bool:
        """Whether a ``fit()`` that validates is under way."""
        return self._every is not None

    @property
    def owed(self) -> bool:
        """Whether the epoch that ends at this step still lacks its validation.

        An earlier ``fit()`` ended before it, or the state was saved before it. Once training has
        gone on it is too late.
        """
        return self._owed_at == self._progress().global_step

    @property
    def missing(self) -> bool:
        """Whether the validation of the newest epoch has not been done."""
        return self.owed or (self._progress().epoch > self._settled and self.due)

    def note_owed(self, owed: bool) -> None:
        """A ``fit()`` is over, or a state is loaded, and a validation was still to come or not."""
        self._owed_at = self._progress().global_step if owed else None

    def note_validated(self) -> None:
        """A validation has been done."""
        self._owed_at, self._settled = None, self._progress().epoch


def run_epochs(
    trainer: Trainer,
    num_epochs: int,
    validations: Validations,
    completed: Callable[[], int],
    train: Callable[[], dict[str, Any]],
    validate: Callable[[], dict[str, Any]],
    limits: Limits,
    monitored: Mapping[str, str],
    tried: Sequence[str],
) -> History:
    """Train until `num_epochs` are completed in all, a limit is reached, or somebody asks to stop.

    ::

        if an epoch was saved, or ended by an exception, before its validation: validate()
        while fewer are completed, no limit is reached and nobody has asked to stop:
            train()
            if it is time to: validate()
    """
    history, is_spoilt = History(), False

    def end() -> str | None:
        return trainer.stop_reason or limits.reached(trainer.global_step)

    if validations.owed and validations.due:
        validate()
    if completed() >= num_epochs:
        logger.warning(
            "fit(%d): nothing to do, the run is complete: %d epochs are trained already. "
            "num_epochs counts from the first epoch of all: num_epochs=%d would train as many "
            "more.",
            num_epochs,
            completed(),
            completed() + num_epochs,
        )
    while end() is None and completed() < num_epochs:
        epoch = completed()
        history.append(train())
        if completed() > epoch and validations.due:
            history[-1] = {**validate(), **history[-1]}
        knows_validation = tried or validations.due or not validations.expected
        if len(history) == 1 and completed() > epoch and knows_validation:
            _warn_of_unknown(monitored, [*dict.fromkeys([*trainer.latest_metrics, *tried])])
        if not is_spoilt and end() is None:
            is_spoilt = _warn_of_nan(completed(), history[-1])
    if (reason := end()) is not None and completed() < num_epochs:
        history.stop_reason = reason
        level = logging.INFO if history else logging.WARNING
        logger.log(level, "fit() ends after %d epochs: %s", completed(), reason)
    return history


def _warn_of_unknown(monitored: Mapping[str, str], metrics: Sequence[str]) -> None:
    """Say which metrics somebody waits for that the first epoch did not have."""
    for given, name in monitored.items():
        if name not in metrics:
            logger.warning(
                "%s: the first epoch had no such metric. There are: %s.%s",
                given,
                ", ".join(metrics),
                meant(name, metrics),
            )


def _warn_of_nan(epoch: int, metrics: Mapping[str, Any]) -> bool:
    """Warn where a loss is no finite number; return whether one is not."""
    losses = {name: value for name, value in numbers_in(metrics).items() if "loss" in name}
    for name, value in losses.items():
        if not math.isfinite(value):
            logger.warning(
                "%s is %s in epoch %d, and training goes on. callbacks=[TerminateOnNaN()] ends it.",
                name,
                value,
                epoch,
            )
            return True
    return False


def check_monitored(monitored: Mapping[str, str], metrics: Sequence[str]) -> None:
    """Refuse a metric of validation that a validation does not have.

    Any other name can be a metric of training, which only an epoch shows. If ``val_NAME`` exists
    this warns.

    Args:
        monitored: names of metrics, by what was given them.
        metrics: the names of those that a validation has; none where there is none.

    Raises:
        ValueError: if one of them is not there.
    """
    for given, name in monitored.items():
        if name in metrics:
            continue
        if name.startswith(_OF_VALIDATION):
            if not metrics:
                raise ValueError(
                    f"{given}: there is no such metric, since fit() does not validate. Register a "
                    "validation loader, leave validate_every out, or name a metric of training."
                )
            raise ValueError(
                f"{given}: there is no such metric. A validation has: {', '.join(metrics)}."
                + meant(name, metrics)
            )
        if f"val_{name}" in metrics:
            logger.warning(
                "%s: a validation has no such metric, but it has 'val_%s'. Unless training has %r, "
                "fit() fails after the first epoch.",
                given,
                name,
                name,
            )
