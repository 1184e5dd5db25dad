"""Wall-clock timers for the stages of a training step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class TimerCollection:
    """Timers by name: ``with timers.record("fwd"): ...``. Almost free if disabled."""

    def __init__(self) -> None:
        self._times: dict[str, tuple[int, float, float]] = {}  # count, total, and last
        self.enabled = True

    def enable(self) -> None:
        self.enabled = True

    def disable(self) -> None:
        self.enabled = False

    def reset(self) -> None:
        self._times.clear()

    def record(self, key: str) -> contextlib.AbstractContextManager[object]:
        """Return a context manager that times its block under `key`."""
        return self._record(key) if self.enabled else contextlib.nullcontext()

    @contextlib.contextmanager
    def _record(self, key: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        count, total, _ = self._times.get(key, (0, 0.0, 0.0))
        self._times[key] = count + 1, total + seconds, seconds

    def stats(self, mean: bool = True, last: bool = False) -> dict[str, float]:
        """Return ``mean_<key>_s`` over all blocks, and with `last` also ``last_<key>_s``."""
        result: dict[str, float] = {}
        for key, (count, total, newest) in self._times.items():
            if mean:
                result[f"mean_{key}_s"] = total / count
            if last:
                result[f"last_{key}_s"] = newest
        return result
