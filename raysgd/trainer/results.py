"""The newest metrics of a trainer, and how callbacks receive them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from raysgd.callbacks.base import LastCall, Trainer
from raysgd.callbacks.callback_list import CallbackList

__all__ = ["Results"]


@dataclass(eq=False)
class Results:
    """Keeps the newest metrics, and passes each result to the callbacks."""

    callback_list: CallbackList
    latest: dict[str, Any] = field(default_factory=dict)
    last_call: LastCall | None = None
    _shown: dict[str, Any] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, Any]:
        """The newest metrics, including those that callbacks are processing."""
        return {**self.latest, **self._shown}

    def show(self, hook: str, trainer: Trainer, metrics: dict[str, Any], call: LastCall) -> None:
        """Pass the metrics of a call to the callbacks, which may add metrics."""
        self.last_call = call
        before, self._shown = self._shown, metrics
        try:
            self.callback_list.call(hook, trainer, metrics)
        finally:
            self._shown = before
            self.latest.update(metrics)

    @contextlib.contextmanager
    def trial(self, trainer: Trainer) -> Iterator[None]:
        """Train without callbacks. Restore the state and the metrics at the end of the context."""
        state, latest, last_call = trainer.state_dict(), self.latest, self.last_call
        self.latest = dict(latest)
        try:
            with self.callback_list.silenced():
                yield
        finally:
            trainer.load_state_dict(state)
            self.latest, self.last_call = latest, last_call
