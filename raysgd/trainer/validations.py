"""The validations of a trainer, and the metrics that schedulers wait for."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from raysgd._internal.context import Progress
from raysgd.callbacks.base import Trainer
from raysgd.elastic.call import Call
from raysgd.loop.requests import UpdateSchedulersRequest
from raysgd.trainer.calls import CallResult, Calls

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Validations:
    """Runs validations, and tracks whether the validation of the newest epoch is missing.

    If an exception ends ``fit()`` before the validation of an epoch, the next ``fit()`` validates
    first.
    """

    calls: Calls
    has_run: bool = False
    _owed_at: int | None = None
    _num_epochs: int = 0
    _every: int | None = None
    _settled: int = 0

    def run(
        self,
        trainer: Trainer,
        info: Mapping[str, Any] | None,
        num_steps: int | None = None,
        profile: bool = False,
        from_start: bool = False,
    ) -> CallResult:
        self.calls.check_open(moves=True)
        with self.calls.callback_list.calling(trainer):
            result = self.calls.validate(
                trainer, num_steps, profile=profile, info=info, from_start=from_start
            )
            self.has_run = True
            self._owed_at, self._settled = None, self._progress.epoch
            self.calls.results.show("on_validation_end", trainer, result.merged, result.call)
        return result

    @contextlib.contextmanager
    def of_fit(self, num_epochs: int, every: int | None) -> Iterator[None]:
        """Validate after every `every` epochs during a ``fit()``."""
        self._num_epochs, self._every = num_epochs, every
        self._settled = self._progress.epoch
        try:
            yield
        finally:
            self.note_owed(self.missing)
            self._num_epochs, self._every = 0, None

    @property
    def _progress(self) -> Progress:
        return self.calls.controller.progress

    @property
    def num_epochs(self) -> int | None:
        return self._num_epochs or None

    @property
    def in_fit(self) -> bool:
        """Whether a ``fit()`` with validations is running."""
        return self._every is not None

    @property
    def due(self) -> bool:
        """Whether ``fit()`` validates after the newest completed epoch."""
        epoch, every = self._progress.epoch, self._every
        return every is not None and (epoch % every == 0 or epoch >= self._num_epochs)

    @property
    def owed(self) -> bool:
        """Whether an earlier ``fit()`` skipped a validation, and no training followed."""
        return self._owed_at == self._progress.global_step

    @property
    def missing(self) -> bool:
        """Whether the validation of the newest epoch is missing."""
        return self.owed or (self._progress.epoch > self._settled and self.due)

    def note_owed(self, owed: bool) -> None:
        """Record whether a validation is missing at the end of a ``fit()`` or after a load."""
        self._owed_at = self._progress.global_step if owed else None

    def update_schedulers(self, metric: float) -> None:
        """Call ``scheduler.step(metric)`` on every scheduler of every worker, once."""
        self.calls.controller.snapshots.outdate()  # earlier snapshots lack this metric
        request = UpdateSchedulersRequest(call=self.calls.next_number(), metric=metric)
        self.calls.make(Call(request=request, max_losses=3))
