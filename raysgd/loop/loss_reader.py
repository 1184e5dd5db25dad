"""Read the newest metrics from another thread than the one that trains."""

from __future__ import annotations

import contextlib
import threading

from raysgd.metrics import AverageMeterCollection

__all__ = ["LossReader"]

_LOSS_WAIT_S = 0.02
"""How long an answer waits for a loss; one that is in memory is there at once."""


class LossReader:
    """Reads the newest metrics, for the thread that answers the driver.

    A GPU gives a number when it has done all before it, and that may be a collective with a worker
    that is gone. So another thread waits for it, and until then they are those before.
    """

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._thread: threading.Thread | None = None

    def read(self, meters: AverageMeterCollection) -> dict[str, float]:
        """Return the newest values that are known; none before there are some."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._wait, args=(meters,), daemon=True)
            self._thread.start()
        self._thread.join(_LOSS_WAIT_S)
        return self._values

    def _wait(self, meters: AverageMeterCollection) -> None:
        with contextlib.suppress(Exception):  # of the GPU, which the thread that trains has too
            self._values = meters.latest()
