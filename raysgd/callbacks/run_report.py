"""A report of a run when it ends."""

from __future__ import annotations

import logging

from raysgd.callbacks.base import Callback, Trainer
from raysgd.callbacks.report import make_report

__all__ = ["RunReport"]

logger = logging.getLogger(__name__)


class RunReport(Callback):
    """Writes ``report.html`` into the trainer's ``logdir``; ``TorchTrainer(logdir=...)`` adds one.

    ``raysgd report RUNDIR`` writes it at any other time.
    """

    stage = 2  # run after the loggers
    needs_logdir = True

    def on_train_end(self, trainer: Trainer) -> None:
        assert trainer.logdir is not None
        try:
            make_report(trainer.logdir)
        except (ImportError, OSError, ValueError) as error:
            logger.warning(
                "No report.html was written. Later, run: raysgd report %s. %s",
                trainer.logdir,
                error,
            )
