"""The loop of ``trainer.fit()``: epochs, validation, and why it ends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from raysgd.callbacks.base import Trainer

__all__ = ["History", "run_epochs"]

logger = logging.getLogger(__name__)


class History(list[dict[str, Any]]):
    """What ``fit()`` measured: one dict an epoch, with the metrics of training and validation.

    Where both have a metric of the same name (``num_samples``), it is that of training.
    """

    stop_reason: str | None = None
    """Why ``fit()`` ended before its last epoch; None if it did not."""


def run_epochs(
    trainer: Trainer,
    num_epochs: int,
    validate_every: int | None,
    completed: Callable[[], int],
    train: Callable[[], dict[str, Any]],
    validate: Callable[[], dict[str, Any]],
) -> History:
    """Train until `num_epochs` are completed in all, or somebody asks to stop.

    ::

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
    while trainer.stop_reason is None and completed() < num_epochs:
        history.append(train())
        done = completed()
        if validate_every and (done % validate_every == 0 or done >= num_epochs):
            history[-1] = {**validate(), **history[-1]}
    if trainer.stop_reason is not None and completed() < num_epochs:
        history.stop_reason = trainer.stop_reason
        logger.info("fit(%d) ends after epoch %d: %s", num_epochs, completed(), trainer.stop_reason)
    return history
