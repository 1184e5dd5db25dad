"""Lines and bars that show the progress of a run on the driver."""

import contextlib
import importlib.util
import math
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from raysgd._internal.step_timing import PHASES
from raysgd._internal.worker_status import BatchProgress
from raysgd.callbacks.base import AnyTrainer, Callback, CallInfo, means_in
from raysgd.metrics import BATCH_COUNT, NUM_SAMPLES

_MAX_METRICS = 4
"""Maximum number of metrics in a bar."""
_LINE_EVERY_S = 30.0
"""Seconds between two lines if there is no terminal."""


class EpochPrinter(Callback):
    """Prints a line for each epoch of ``fit()``, which adds this callback.

    ::

        epoch 2/8  train_loss 0.3123  val_loss 0.2911  val_accuracy 0.9115  3.1 s

    The time covers training and validation. In a terminal, the line has the metrics that fit,
    losses first. The callback prints to standard error, and in a notebook to standard output.
    """

    _sample_note = ""

    def on_epoch_end(self, trainer: AnyTrainer, metrics: dict[str, Any]) -> None:
        self._sample_note = _describe_samples(trainer, metrics)

    def on_epoch_result(self, trainer: AnyTrainer, call: CallInfo, metrics: dict[str, Any]) -> None:
        if not trainer.is_fitting:
            return
        means = means_in(metrics)
        width = shutil.get_terminal_size().columns if _in_terminal() else math.inf
        names = sorted(means, key=lambda name: "loss" not in name)
        shown = [f"{name} {means[name]:.4g}" for name in names]
        shown[:1] = [f"{each}{self._sample_note}" for each in shown[:1]]
        begin, end = _position_in_run(trainer, trainer.epoch), f"{call.seconds:.1f} s"
        while len(line := "  ".join([begin, *shown, end])) > width and shown:
            shown.pop()
        _print(line)

    def on_train_end(self, trainer: AnyTrainer) -> None:
        if trainer.stop_reason is not None:
            _print(f"stopped in epoch {trainer.epoch}: {trainer.stop_reason}")


class ProgressBar(Callback):
    """Shows batches, newest metrics, samples per second and live workers of each call.

    In a terminal, or a notebook with ipywidgets, this callback draws a bar. In ``fit()``, the bar
    goes when its call ends. Elsewhere, the callback prints a line every 30 seconds, and at the end
    of a call outside of ``fit()``. ``TorchTrainer(use_tqdm=True)`` adds this callback. If other
    callbacks print, put this one before them, so that its line is complete.
    """

    def __init__(self) -> None:
        self._kind = ""
        """``train`` or ``validate`` during a call."""
        self._bar: Any = None
        self._next_line_at = 0.0
        self._logs_above = contextlib.ExitStack()

    def on_progress(
        self, trainer: AnyTrainer, kind: str, progress: Sequence[BatchProgress]
    ) -> None:
        label = kind
        if trainer.is_fitting:
            label = f"{_position_in_run(trainer, trainer.epoch)}, validation"
            if kind == "train":
                label = _position_in_run(trainer, trainer.num_completed_epochs + 1)
        if self._kind != kind:
            self._begin(trainer, kind, label)
        if not progress:
            return
        # The workers may have evaluated different numbers of batches.
        if not (num_batches := math.ceil(fmean(each.num_batches for each in progress))):
            return
        if self._bar is None:
            if time.monotonic() < self._next_line_at:
                return
            self._next_line_at = time.monotonic() + _LINE_EVERY_S
        metrics = [each.latest_metrics for each in progress]
        names = dict.fromkeys(name for each in metrics for name in each)
        latest = {n: fmean(each[n] for each in metrics if n in each) for n in names}
        # The workers restart their count after a pause or a failure within the call.
        num_done, total = num_batches, progress[0].num_total_batches
        if kind == "train":
            num_done = max(num_done, progress[0].global_step - self._first_step)
        if total is not None:
            total += num_done - num_batches
        num_samples = sum(each.num_samples for each in progress) * num_done / num_batches
        self._show(trainer, label, num_done, total, num_samples, latest)

    def on_epoch_end(self, trainer: AnyTrainer, metrics: dict[str, Any]) -> None:
        self._finish(trainer, f"train {trainer.epoch}", metrics)

    on_partial_epoch_end = on_epoch_end

    def on_validation_end(self, trainer: AnyTrainer, metrics: dict[str, Any]) -> None:
        self._finish(trainer, "validate", metrics)

    def on_train_end(self, trainer: AnyTrainer) -> None:
        self._close()

    def on_exception(self, trainer: AnyTrainer, error: BaseException) -> None:
        self._close()  # before the traceback, because the callback ends only with the trainer

    def _begin(self, trainer: AnyTrainer, kind: str, label: str) -> None:
        self._close()
        self._kind = kind
        self._started = time.perf_counter()
        self._first_step = trainer.global_step
        self._next_line_at = time.monotonic() + _LINE_EVERY_S
        if is_interactive():
            from tqdm.auto import tqdm
            from tqdm.contrib.logging import logging_redirect_tqdm

            self._logs_above.enter_context(logging_redirect_tqdm(tqdm_class=tqdm))
            self._bar = tqdm(
                desc=label,
                unit="batch",
                dynamic_ncols=True,
                file=sys.stderr,
                leave=not trainer.is_fitting,
            )

    def _show(
        self,
        trainer: AnyTrainer,
        label: str,
        num_done: int,
        total: int | None,
        num_samples: float | None,
        means: Mapping[str, float],
    ) -> None:
        elapsed_s = max(time.perf_counter() - self._started, 1e-9)
        shown = {
            name.removeprefix("train_").removeprefix("val_"): f"{mean:.4g}"
            for name, mean in [*means.items()][:_MAX_METRICS]
        }
        if num_samples is not None:
            shown["samples/s"] = f"{num_samples / elapsed_s:.0f}"
        if self._kind == "train":
            shown |= _slow_phase(trainer)
        shown["workers"] = f"{trainer.num_workers}/{trainer.max_workers}"
        shares = [event.shares for event in trainer.events if event.shares][-1:]
        if shares and len(set(shares[0])) > 1:
            shown["shares"] = "/".join(f"{share:.2g}" for share in shares[0])
        if self._bar is None:
            words = [f"{num_done}/{total or '?'} batches"] if num_done else []
            words += [f"{name}={value}" for name, value in shown.items()]
            _print(f"{label}: {', '.join(words)}")
            return
        if total is not None and total != self._bar.total:
            began = self._bar.start_t
            self._bar.reset(total)  # in a notebook, an assignment does not change the widget
            self._bar.start_t = began
        self._bar.set_description(label, refresh=False)
        self._bar.set_postfix(shown, refresh=False)
        self._bar.n = num_done
        self._bar.refresh()

    def _finish(self, trainer: AnyTrainer, label: str, metrics: dict[str, Any]) -> None:
        if self._kind and not trainer.is_fitting:
            # A user's loop may not count its batches.
            steps = trainer.global_step - self._first_step
            shown = 0 if self._bar is None else self._bar.n
            done = round(metrics.get(BATCH_COUNT, steps or shown))
            means = means_in(metrics)
            self._show(trainer, label, done, done or None, metrics.get(NUM_SAMPLES), means)
        self._close(is_done=True)

    def _close(self, is_done: bool = False) -> None:
        bar, self._bar, self._kind = self._bar, None, ""
        if bar is not None:
            if is_done:  # a notebook shows an incomplete bar as failed
                bar.total = bar.n
            bar.close()
        self._logs_above.close()


def is_interactive() -> bool:
    """Return whether a bar can be redrawn: in a terminal, or a notebook with ipywidgets."""
    has_widgets = importlib.util.find_spec("ipywidgets") is not None
    return has_widgets if _in_notebook() else _in_terminal()


def _in_terminal() -> bool:
    return not _in_notebook() and getattr(sys.stderr, "isatty", bool)()  # it can be None


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


def _print(line: str) -> None:
    print(line, file=sys.stdout if _in_notebook() else sys.stderr, flush=True)


def _position_in_run(trainer: AnyTrainer, epoch: int) -> str:
    """Return "epoch 2/8", or "epoch 2" if a number of steps or a duration limits the `fit`."""
    return f"epoch {epoch}" if trainer.num_epochs is None else f"epoch {epoch}/{trainer.num_epochs}"


def _slow_phase(trainer: AnyTrainer) -> dict[str, str]:
    """Return the phase that takes longest, and its fraction, unless it is computing."""
    workers = trainer.speed().workers
    totals = {name: sum(w.num_steps * w.phase_s[name] for w in workers) for name in PHASES}
    computing_s = sum(w.num_steps * w.computing_s for w in workers)
    longest = max(totals, key=lambda name: totals[name])
    if totals[longest] <= max(computing_s, 1.0):
        return {}
    return {longest: f"{totals[longest] / sum(totals.values()):.0%}"}


def _describe_samples(trainer: AnyTrainer, metrics: Mapping[str, Any]) -> str:
    """Return how many samples the metrics of an epoch measure, if lost workers had others."""
    call, number = trainer.last_call, metrics.get(NUM_SAMPLES, 0)
    if call is None or not any(
        event.kind == "lost" and event.time > call.time - call.seconds for event in trainer.events
    ):
        return ""
    total = f"of {call.epoch_samples} " if call.epoch_samples > number else ""
    return f" ({number:.0f} {total}samples measured, all trained)"
