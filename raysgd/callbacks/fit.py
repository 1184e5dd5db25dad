"""The loop of ``trainer.fit()``: epochs, validation, and why it ends."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from raysgd.callbacks.base import Trainer

__all__ = ["History", "Validations", "run_epochs"]

logger = logging.getLogger(__name__)


class History(list[dict[str, Any]]):
    """What ``fit()`` measured: one dict an epoch, with the metrics of training and validation.

    Where both have a metric of the same name (``num_samples``), it is that of training.
    """

    stop_reason: str | None = None
    """Why ``fit()`` ended before its last epoch; None if it did not."""


class Validations:
    """After which epochs ``fit()`` validates, and whether that of the newest is still to come.

    What is saved at the end of an epoch comes before its validation. A run that goes on from there
    validates first, so that callbacks see the values that they would have seen.
    """

    def __init__(self) -> None:
        self.owed = False
        """Whether the state that was loaded was saved between an epoch and its validation."""
        self._num_epochs = 0
        self._every: int | None = None
        self._settled = 0

    @contextlib.contextmanager
    def of_fit(self, num_epochs: int, every: int | None, completed: int) -> Iterator[None]:
        """Follow the rule of a ``fit()`` while it runs."""
        self._num_epochs, self._every, self._settled = num_epochs, every, completed
        try:
            yield
        finally:
            self._every = None

    def due_after(self, epoch: int) -> bool:
        """Whether ``fit()`` validates when so many epochs are completed."""
        every = self._every
        return every is not None and (epoch % every == 0 or epoch >= self._num_epochs)

    def missing_after(self, epoch: int) -> bool:
        """Whether that validation has not been done."""
        return self.owed or (epoch > self._settled and self.due_after(epoch))

    def note_trained(self) -> None:
        """Training has gone on: what was owed before comes too late."""
        self.owed = False

    def note_validated(self, epoch: int) -> None:
        """A validation has been done."""
        self.owed, self._settled = False, epoch


def run_epochs(
    trainer: Trainer,
    num_epochs: int,
    validations: Validations,
    completed: Callable[[], int],
    train: Callable[[], dict[str, Any]],
    validate: Callable[[], dict[str, Any]],
) -> History:
    """Train until `num_epochs` are completed in all, or somebody asks to stop.

    ::

        if the state was saved between an epoch and its validation: validate()
        while fewer are completed and nobody has asked to stop:
            train()
            if it is time to: validate()
    """
    history = History()
    if completed() >= num_epochs:
        logger.warning(
            "fit(%d): nothing to do, since %d epochs are trained already. num_epochs counts from "
            "the first epoch of all: fit(%d) would train as many more.",
            num_epochs,
            completed(),
            completed() + num_epochs,
        )
    if validations.owed and validations.due_after(completed()):
        validate()
    while trainer.stop_reason is None and completed() < num_epochs:
        history.append(train())
        if validations.due_after(completed()):
            history[-1] = {**validate(), **history[-1]}
    if trainer.stop_reason is not None and completed() < num_epochs:
        history.stop_reason = trainer.stop_reason
        logger.info("fit(%d) ends after epoch %d: %s", num_epochs, completed(), trainer.stop_reason)
    return history
