"""A line for each epoch that ``fit()`` finishes."""

from __future__ import annotations

import importlib.util
import math
import shutil
import sys
from typing import Any

from raysgd.callbacks.base import Callback, Trainer
from raysgd.callbacks.values import numbers_in
from raysgd.metrics import BATCH_COUNT, NUM_SAMPLES

_MOST = 8
"""Maximum number of metrics in a line."""
_WITHOUT_END = sys.maxsize
"""Value of `num_epochs` in a `fit` that only a number of steps or a duration limits."""


class EpochLines(Callback):
    """Prints a line for each epoch of ``fit()``, which adds this callback.

    ::

        epoch 2/8  train_loss 0.3123  val_loss 0.2911  val_accuracy 0.9115  3.1 s

    The time covers training and validation. In a terminal, ``…`` stands for metrics that do not
    fit. The callback prints to standard error, and in a notebook to standard output.
    """

    def __init__(self) -> None:
        self._means: dict[str, float] = {}
        self._seconds = 0.0
        self._waits = False
        """Whether the line waits for a validation."""

    def on_train_start(self, trainer: Trainer) -> None:
        self._waits = trainer.validation_due

    def on_epoch_end(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        self._means, self._seconds = {}, 0.0
        self._waits = trainer.validation_due
        self._add(trainer, metrics)

    def on_validation_end(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        if self._waits:
            self._waits = False
            self._add(trainer, metrics)

    def _add(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        self._means |= means_in(metrics)
        self._seconds += 0.0 if trainer.last_call is None else trainer.last_call.seconds
        if not self._waits and trainer.num_epochs is not None:
            begin, end = place_of(trainer, trainer.epoch), f"{self._seconds:.1f} s"
            self._print(_fitted(begin, self._means, end, _width()))

    def on_train_end(self, trainer: Trainer) -> None:
        if trainer.stop_reason is not None:
            self._print(f"stopped after epoch {trainer.epoch}: {trainer.stop_reason}")

    def _print(self, line: str) -> None:
        print(line, file=sys.stdout if _in_notebook() else sys.stderr, flush=True)


def _fitted(begin: str, means: dict[str, float], end: str, width: float) -> str:
    """Return a line of at most `width` columns, or with only one metric.

    If not all metrics fit, losses come first, and then metrics of validation.
    """
    shown = {name: f"{name} {value:.4g}" for name, value in means.items()}
    line = "  ".join([begin, *shown.values(), end])
    if len(shown) <= _MOST and len(line) <= width:
        return line
    names = sorted(shown, key=lambda name: ("loss" not in name) * (2 - name.startswith("val")))
    for most in range(min(_MOST, len(names) - 1), 0, -1):
        line = "  ".join([begin, *(shown[name] for name in names[:most]), "…", end])
        if len(line) <= width:
            break
    return line


def _width() -> float:
    """Return the width of the terminal, or infinity for a file."""
    in_terminal = sys.stderr.isatty() and not _in_notebook()
    return shutil.get_terminal_size().columns if in_terminal else math.inf


def means_in(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the numbers in the result of a call, without counts and last values."""
    counts = ("epoch", NUM_SAMPLES, BATCH_COUNT)
    return {
        name: value
        for name, value in numbers_in(metrics).items()
        if name not in counts and not name.startswith(("last_", "profile/"))
    }


def is_interactive() -> bool:
    """Return whether a bar can be redrawn: in a terminal, or a notebook with ipywidgets."""
    if _in_notebook():
        return importlib.util.find_spec("ipywidgets") is not None
    return sys.stderr.isatty()


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


def place_of(trainer: Trainer, epoch: int) -> str:
    """Return "epoch 2/8", or "epoch 2" if a number of steps or a duration limits the `fit`."""
    has_end = trainer.num_epochs is not None and trainer.num_epochs < _WITHOUT_END
    return f"epoch {epoch}/{trainer.num_epochs}" if has_end else f"epoch {epoch}"
