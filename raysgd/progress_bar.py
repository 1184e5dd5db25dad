"""The driver's progress bar: one line for the whole group."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tqdm.auto import tqdm

from raysgd.context import Progress

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
        if not progress:
            return
        first = progress[0]
        if self._bar.total != first.total_batches:
            self._bar.total = first.total_batches
        elapsed = max(time.perf_counter() - self._started, 1e-9)
        losses = [p.loss for p in progress if p.loss is not None]
        shown = {
            "samples/s": f"{sum(p.num_samples for p in progress) / elapsed:.0f}",
            "workers": f"{len(progress)}/{self._max_workers}",
        }
        if losses:
            shown = {"loss": f"{sum(losses) / len(losses):.4g}", **shown}
        self._bar.set_postfix(shown, refresh=False)
        self._bar.n = first.num_batches
        self._bar.refresh()

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()
