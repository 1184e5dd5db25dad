"""The page about a run, made when the run ends."""

from __future__ import annotations

import logging

from raysgd.callbacks.base import Callback, Trainer
from raysgd.callbacks.report import make_report

__all__ = ["RunReport"]

logger = logging.getLogger(__name__)


class RunReport(Callback):
    """Writes ``report.html`` into the trainer's ``logdir``; ``TorchTrainer(logdir=...)`` has one.

    ``raysgd report RUNDIR`` makes it at any other time, also of a run that was killed.
    """

    stage = 2  # when all that is logged has been written
    needs_logdir = True

    _said = ""

    def on_train_end(self, trainer: Trainer) -> None:
        """Make the page; a run does not fail for the want of it."""
        assert trainer.logdir is not None
        try:
            make_report(trainer.logdir)
        except (ImportError, OSError, ValueError) as error:
            if str(error) != self._said:  # runs end more than once: each fit() is one
                self._said = str(error)
                logger.warning(
                    "No report.html was made; raysgd report %s makes it later. %s",
                    trainer.logdir,
                    error,
                )
