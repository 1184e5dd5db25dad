"""The driver's progress bar: one line for the whole group."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from raysgd._internal.context import Progress
from raysgd.callbacks.base import Trainer
from raysgd.callbacks.epoch_lines import EpochLines, is_interactive, means_in, place_of
from raysgd.metrics import BATCH_COUNT, NUM_SAMPLES

_MOST = 4
"""Maximum number of metrics in a bar."""
_MOST_SHARES = 8
"""Maximum number of workers whose shares are in a bar."""


class ProgressBar(EpochLines):
    """Shows batches, newest metrics, samples per second and live workers of each call.

    In a terminal, or a notebook with ipywidgets, this callback draws a bar. In ``fit()``, the line
    of the epoch replaces the bar. Elsewhere, the callback prints a line from time to time, and at
    the end of a call or epoch. ``TorchTrainer(use_tqdm=True)`` adds this callback. If other
    callbacks print, put this one before them, so that its line is complete.

    Args:
        every_s: seconds between two lines without a terminal.

    Raises:
        ValueError: if `every_s` is not positive.
    """

    def __init__(self, every_s: float = 30.0) -> None:
        if not every_s > 0:
            raise ValueError(f"ProgressBar(every_s={every_s!r}): must be above 0.")
        super().__init__()
        self._every_s = every_s
        self._display: _Bar | _Lines | None = None
        self._kind = self._label = ""
        self._num_samples = self._samples_before = 0

    def on_progress(self, trainer: Trainer, kind: str, progress: Sequence[Progress]) -> None:
        if self._display is None or self._kind != kind:
            self._begin(trainer, kind)
        if not progress:
            return
        first, compiling = progress[0], any(each.compiling for each in progress)
        # With shares, the workers evaluate different numbers of batches.
        num_batches = math.ceil(_mean([p.num_batches for p in progress]))
        if not (num_batches or compiling):
            return
        names = dict.fromkeys(name for each in progress for name in each.latest)
        latest = {n: _mean([p.latest[n] for p in progress if n in p.latest]) for n in names}
        # The workers restart their count after a pause or a failure within the call.
        done = num_batches
        if kind == "train":
            done = max(done, first.global_step - self._first_step)
        total = first.total_batches and done - num_batches + first.total_batches
        num_samples = sum(p.num_samples for p in progress)
        if num_samples < self._num_samples:
            self._samples_before += self._num_samples
        self._num_samples = num_samples
        if trainer.num_epochs is not None and kind == "train":
            self._label = place_of(trainer, first.epoch + 1)
        assert self._display is not None
        label = self._label + ", compiling" * compiling
        shown = self._format(trainer, self._samples_before + num_samples, latest)
        self._display.show(label, done, total, shown)

    def on_epoch_end(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        self._finish(trainer, f"train {trainer.epoch}", metrics)
        super().on_epoch_end(trainer, metrics)

    def on_steps_end(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        self._finish(trainer, f"train {trainer.epoch}", metrics)

    def on_validation_end(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        self._finish(trainer, "validate", metrics)
        super().on_validation_end(trainer, metrics)

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        self._close()

    def on_train_end(self, trainer: Trainer) -> None:
        self._close()
        super().on_train_end(trainer)

    def _begin(self, trainer: Trainer, kind: str) -> None:
        self._close()
        self._kind = self._label = kind
        if trainer.num_epochs is not None:
            is_validation = kind == "validate"
            # Guess the epoch, because workers report it only with their first batch.
            self._label = place_of(trainer, trainer.epoch + (not is_validation))
            self._label += ", validation" * is_validation
        if is_interactive():
            self._display = _Bar(self._label, stays=trainer.num_epochs is None)
        else:
            self._display = _Lines(self._every_s)
        self._started = time.perf_counter()
        self._first_step = trainer.global_step
        self._num_samples = self._samples_before = 0

    def _finish(self, trainer: Trainer, label: str, metrics: dict[str, Any]) -> None:
        if self._display is not None and trainer.num_epochs is None:
            # A user's loop may not count its batches.
            steps = trainer.global_step - self._first_step if self._kind == "train" else None
            counted = metrics.get(BATCH_COUNT, steps)
            num_batches = None if counted is None else round(counted)
            shown = self._format(trainer, metrics.get(NUM_SAMPLES), means_in(metrics))
            self._display.finish(label, num_batches, shown)
        self._close(is_done=True)

    def _format(
        self, trainer: Trainer, num_samples: float | None, means: Mapping[str, float]
    ) -> dict[str, str]:
        elapsed_s = max(time.perf_counter() - self._started, 1e-9)
        first = [*means.items()][:_MOST]
        shown = {
            name.removeprefix("train_").removeprefix("val_"): f"{mean:.4g}" for name, mean in first
        }
        if num_samples is not None:
            shown["samples/s"] = f"{num_samples / elapsed_s:.0f}"
        shown["workers"] = f"{trainer.num_workers}/{trainer.max_workers}"
        shares: Sequence[float] = ()
        for event in trainer.events:
            shares = event.shares or shares
        if len(set(shares)) > 1:
            first_ones = "/".join(f"{share:.2g}" for share in shares[:_MOST_SHARES])
            shown["shares"] = first_ones + "/..." * (len(shares) > _MOST_SHARES)
        return shown

    def _close(self, is_done: bool = False) -> None:
        display, self._display = self._display, None
        if display is not None:
            display.close(is_done)


class _Bar:
    """Draws a bar. Log messages appear above it."""

    def __init__(self, label: str, stays: bool) -> None:
        from tqdm.auto import tqdm  # warns in a notebook without ipywidgets
        from tqdm.contrib.logging import logging_redirect_tqdm

        self._logs_above = contextlib.ExitStack()
        self._logs_above.enter_context(logging_redirect_tqdm(tqdm_class=tqdm))
        self._bar = tqdm(desc=label, unit="batch", dynamic_ncols=True, file=sys.stderr, leave=stays)

    def show(self, label: str, done: int, total: int | None, shown: dict[str, str]) -> None:
        if total is not None and total != self._bar.total:
            self._bar.reset(total)  # in a notebook, an assignment does not change the widget
        self._bar.set_description(label, refresh=False)
        self._bar.set_postfix(shown, refresh=False)
        self._bar.n = done
        self._bar.refresh()

    def finish(self, label: str, num_batches: int | None, shown: dict[str, str]) -> None:
        if num_batches is None:
            num_batches = int(self._bar.total or self._bar.n)
        self.show(label, num_batches, num_batches or None, shown)

    def close(self, is_done: bool) -> None:
        if is_done:  # a notebook shows an incomplete bar as failed
            self._bar.total = self._bar.n
        self._bar.close()
        self._logs_above.close()


class _Lines:
    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._next = time.monotonic() + every_s

    def show(self, label: str, done: int, total: int | None, shown: dict[str, str]) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every_s
            self._print(label, f"{done}/{total or '?'}", shown)

    def finish(self, label: str, num_batches: int | None, shown: dict[str, str]) -> None:
        self._print(label, None if num_batches is None else f"{num_batches}/{num_batches}", shown)

    def close(self, is_done: bool) -> None:
        pass

    def _print(self, label: str, done: str | None, shown: dict[str, str]) -> None:
        parts = [] if done is None else [f"{done} batches"]
        parts += [f"{name}={value}" for name, value in shown.items()]
        print(f"{label}: {', '.join(parts)}", file=sys.stderr, flush=True)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
