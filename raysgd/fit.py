"""The loop of ``trainer.fit()``: epochs, validation, and why it ends."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from raysgd.callbacks.base import History, Trainer
from raysgd.context import Progress

__all__ = ["Validations", "run_epochs"]

logger = logging.getLogger(__name__)


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
            self._every = None

    @property
    def due(self) -> bool:
        """Whether ``fit()`` validates after the newest epoch that is completed."""
        epoch, every = self._progress().epoch, self._every
        return every is not None and (epoch % every == 0 or epoch >= self._num_epochs)

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
) -> History:
    """Train until `num_epochs` are completed in all, or somebody asks to stop.

    ::

        if an epoch was saved, or ended by an exception, before its validation: validate()
        while fewer are completed and nobody has asked to stop:
            train()
            if it is time to: validate()
    """
    history = History()
    if validations.owed and validations.due:
        validate()
    elif completed() >= num_epochs:
        logger.warning(
            "fit(%d): nothing to do, since %d epochs are trained already. num_epochs counts from "
            "the first epoch of all: fit(%d) would train as many more.",
            num_epochs,
            completed(),
            completed() + num_epochs,
        )
    while trainer.stop_reason is None and completed() < num_epochs:
        history.append(train())
        if validations.due:
            history[-1] = {**validate(), **history[-1]}
    if trainer.stop_reason is not None and completed() < num_epochs:
        history.stop_reason = trainer.stop_reason
        logger.info("fit(%d) ends after epoch %d: %s", num_epochs, completed(), trainer.stop_reason)
    return history
