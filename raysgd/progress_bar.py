"""The driver's progress bar: one line for the whole group."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm.auto import tqdm

from raysgd.context import Progress
from raysgd.metrics import BATCH_COUNT, NUM_SAMPLES

__all__ = ["ProgressBar"]


class ProgressBar:
    """Shows batches, loss, samples a second and live workers of one call.

    A bar in a terminal or a notebook is redrawn in place; its last state stays.
    """

    def __init__(self, method: str, max_workers: int) -> None:
        self._max_workers = max_workers
        self._started = time.perf_counter()
        self._bar = tqdm(desc=method, unit="batch", dynamic_ncols=True)

    def update(self, progress: Sequence[Progress]) -> None:
        """Show how far the workers are."""
        if progress and progress[0].num_batches:
            losses = [p.loss for p in progress if p.loss is not None]
            self._bar.total = progress[0].total_batches
            self._show(
                progress[0].num_batches,
                sum(p.num_samples for p in progress),
                len(progress),
                sum(losses) / len(losses) if losses else None,
            )

    def finish(self, metrics: Mapping[str, Any], num_workers: int) -> None:
        """Show the result of the call."""
        num_batches = round(metrics.get(BATCH_COUNT, 0))
        self._bar.total = num_batches
        loss = metrics.get("train_loss", metrics.get("val_loss"))
        self._show(num_batches, metrics.get(NUM_SAMPLES, 0), num_workers, loss)

    def _show(
        self, num_batches: int, num_samples: float, num_workers: int, loss: float | None
    ) -> None:
        elapsed = max(time.perf_counter() - self._started, 1e-9)
        shown = {} if loss is None else {"loss": f"{loss:.4g}"}
        shown["samples/s"] = f"{num_samples / elapsed:.0f}"
        shown["workers"] = f"{num_workers}/{self._max_workers}"
        self._bar.set_postfix(shown, refresh=False)
        self._bar.n = num_batches
        self._bar.refresh()

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()
