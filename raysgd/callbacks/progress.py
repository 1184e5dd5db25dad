"""The driver's progress bar: one line for the whole group."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from tqdm.auto import tqdm

from raysgd.callbacks.base import Callback, Trainer
from raysgd.context import Progress
from raysgd.metrics import BATCH_COUNT, NUM_SAMPLES

__all__ = ["ProgressBar"]


class ProgressBar(Callback):
    """Shows batches, loss, samples a second and live workers of each call.

    In a terminal or a notebook it is a bar that is redrawn in place, and whose last state stays.
    Where standard error goes to a file, it is a line now and then and one at the end of a call.
    ``TorchTrainer(use_tqdm=True)`` has one. Give it as the first callback where others print: its
    line is done then.

    Args:
        every_s: seconds between two lines where there is no terminal.

    Raises:
        ValueError: if `every_s` is not above 0.
    """

    def __init__(self, every_s: float = 30.0) -> None:
        if not every_s > 0:
            raise ValueError(f"ProgressBar(every_s={every_s!r}): must be above 0.")
        self._every_s = every_s
        self._display: _Bar | _Lines | None = None
        self._kind = ""
        self._num_samples = self._samples_before = 0

    def on_progress(self, trainer: Trainer, kind: str, progress: Sequence[Progress]) -> None:
        """Show how far the workers are."""
        if self._display is None or self._kind != kind:
            self._begin(trainer, kind)
        if not progress or not progress[0].num_batches:
            return
        first, loss = progress[0], _mean([p.loss for p in progress if p.loss is not None])
        # a call has several segments where it pauses or loses a worker: count over all of them
        done = first.num_batches
        if kind == "train":
            done = max(done, first.global_step - self._first_step)
        total = first.total_batches and done - first.num_batches + first.total_batches
        num_samples = sum(p.num_samples for p in progress)
        if num_samples < self._num_samples:
            self._samples_before += self._num_samples
        self._num_samples = num_samples
        shown = self._told(trainer, self._samples_before + num_samples, loss)
        assert self._display is not None
        self._display.show(done, total, shown)

    def on_epoch_end(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        """Show the result of a ``train()``."""
        self._finish(trainer, f"train {trainer.epoch}", metrics, "train_loss")

    on_steps_end = on_epoch_end

    def on_validation_end(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        """Show the result of a ``validate()``."""
        self._finish(trainer, "validate", metrics, "val_loss")

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Leave the bar as it is."""
        self._close()

    def on_train_end(self, trainer: Trainer) -> None:
        """Leave the bar as it is."""
        self._close()

    def _begin(self, trainer: Trainer, kind: str) -> None:
        self._close()
        self._kind = kind
        self._display = _Bar(kind) if _is_interactive() else _Lines(kind, self._every_s)
        self._started = time.perf_counter()
        self._first_step = trainer.global_step
        self._num_samples = self._samples_before = 0

    def _finish(self, trainer: Trainer, label: str, metrics: dict[str, Any], loss: str) -> None:
        if self._display is not None:
            # loops that users write need not say how much they have read
            steps = trainer.global_step - self._first_step if self._kind == "train" else None
            counted = metrics.get(BATCH_COUNT, steps)
            num_batches = None if counted is None else round(counted)
            shown = self._told(trainer, metrics.get(NUM_SAMPLES), metrics.get(loss))
            self._display.finish(label, num_batches, shown)
        self._close()

    def _told(self, trainer: Trainer, num_samples: float | None, loss: Any) -> dict[str, str]:
        elapsed_s = max(time.perf_counter() - self._started, 1e-9)
        shown = {"loss": f"{loss:.4g}"} if isinstance(loss, int | float) else {}
        if num_samples is not None:
            shown["samples/s"] = f"{num_samples / elapsed_s:.0f}"
        shown["workers"] = f"{trainer.num_workers}/{trainer.max_workers}"
        return shown

    def _close(self) -> None:
        display, self._display = self._display, None
        if display is not None:
            display.close()


class _Bar:
    """A bar of tqdm."""

    def __init__(self, label: str) -> None:
        self._bar = tqdm(desc=label, unit="batch", dynamic_ncols=True, file=sys.stderr)

    def show(self, num_batches: int, total: int | None, shown: dict[str, str]) -> None:
        if total != self._bar.total and not self._bar.disable:
            # a notebook's bar takes a new total by this alone, which also starts its clock anew
            began = self._bar.start_t
            self._bar.reset(total)
            self._bar.start_t = began
        self._bar.total = total
        self._bar.set_postfix(shown, refresh=False)
        self._bar.n = num_batches
        self._bar.refresh()

    def finish(self, label: str, num_batches: int | None, shown: dict[str, str]) -> None:
        self._bar.set_description(label, refresh=False)
        known = self._bar.total or self._bar.n  # as far as the call is known to have come
        num_shown = int(known) if num_batches is None else num_batches
        self.show(num_shown, num_shown or None, shown)

    def close(self) -> None:
        self._bar.close()


class _Lines:
    """Lines in a file: few enough to be read, and enough to see that it goes on."""

    def __init__(self, label: str, every_s: float) -> None:
        self._label = label
        self._every_s = every_s
        self._next = time.monotonic() + every_s

    def show(self, num_batches: int, total: int | None, shown: dict[str, str]) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every_s
            self._write(self._label, f"{num_batches}/{total or '?'}", shown)

    def finish(self, label: str, num_batches: int | None, shown: dict[str, str]) -> None:
        self._write(label, None if num_batches is None else f"{num_batches}/{num_batches}", shown)

    def close(self) -> None:
        pass

    def _write(self, label: str, done: str | None, shown: dict[str, str]) -> None:
        told = [] if done is None else [f"{done} batches"]
        told += [f"{name}={value}" for name, value in shown.items()]
        print(f"{label}: {', '.join(told)}", file=sys.stderr, flush=True)


def _is_interactive() -> bool:
    """Whether what is written to standard error can be redrawn in place."""
    if sys.stderr.isatty():
        return True
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
