"""Wall-clock timers for the stages of a training step."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator

__all__ = ["TimerCollection", "TimerStat"]


class TimerStat:
    """Times a block of code: ``with timer: ...``.

    Mean and throughput cover the last `window_size` blocks. ``count`` and ``total_s`` cover all.

    >>> timer = TimerStat()
    >>> with timer:
    ...     pass
    >>> timer.count
    1
    """

    def __init__(self, window_size: int = 10) -> None:
        self._samples: collections.deque[float] = collections.deque(maxlen=window_size)
        self._units: collections.deque[float] = collections.deque(maxlen=window_size)
        self._started: float | None = None
        self.count = 0
        self.total_s = 0.0

    def __enter__(self) -> TimerStat:
        if self._started is not None:
            raise RuntimeError("This TimerStat is running. Use another one for a nested block.")
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._started is not None
        self.push(time.perf_counter() - self._started)
        self._started = None

    def push(self, seconds: float) -> None:
        """Add a duration in seconds."""
        self._samples.append(seconds)
        self.count += 1
        self.total_s += seconds

    def push_units_processed(self, units: float) -> None:
        """Record how many units, such as samples, the last block processed."""
        self._units.append(units)

    def has_units_processed(self) -> bool:
        """Return whether units were recorded."""
        return bool(self._units)

    @property
    def mean(self) -> float:
        """Mean duration in seconds over the window, or 0 before the first block."""
        return sum(self._samples) / len(self._samples) if self._samples else 0.0

    @property
    def median(self) -> float:
        """Median duration in seconds over the window, or 0 before the first block."""
        ordered = sorted(self._samples)
        return ordered[len(ordered) // 2] if ordered else 0.0

    @property
    def sum(self) -> float:
        """Sum of the durations in the window, in seconds."""
        return sum(self._samples)

    @property
    def max(self) -> float:
        """Longest duration in the window, in seconds, or 0 before the first block."""
        return max(self._samples, default=0.0)

    @property
    def first(self) -> float:
        """Oldest duration in the window, in seconds, or 0 before the first block."""
        return self._samples[0] if self._samples else 0.0

    @property
    def last(self) -> float:
        """Newest duration in seconds, or 0 before the first block."""
        return self._samples[-1] if self._samples else 0.0

    @property
    def size(self) -> int:
        """Number of durations in the window."""
        return len(self._samples)

    @property
    def mean_units_processed(self) -> float:
        """Mean units per block over the window, or 0 without units."""
        return sum(self._units) / len(self._units) if self._units else 0.0

    @property
    def mean_throughput(self) -> float:
        """Units per second over the window, or 0 without units or time."""
        return sum(self._units) / self.sum if self._units and self.sum > 0 else 0.0

    def reset(self) -> None:
        """Discard all values."""
        self._samples.clear()
        self._units.clear()
        self.count, self.total_s = 0, 0.0


class TimerCollection:
    """Timers by name: ``with timers.record("fwd"): ...``. Almost free if disabled."""

    def __init__(self) -> None:
        self._timers: dict[str, TimerStat] = {}
        self.enabled = True
        """Whether blocks are timed."""

    def enable(self) -> None:
        """Start timing blocks."""
        self.enabled = True

    def disable(self) -> None:
        """Stop timing blocks."""
        self.enabled = False

    def reset(self) -> None:
        """Discard all timers."""
        self._timers.clear()

    def record(self, key: str) -> contextlib.AbstractContextManager[object]:
        """Return a context manager that times its block under `key`."""
        return self._record(key) if self.enabled else contextlib.nullcontext()

    @contextlib.contextmanager
    def _record(self, key: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._timers.setdefault(key, TimerStat()).push(time.perf_counter() - started)

    def stats(self, mean: bool = True, last: bool = False) -> dict[str, float]:
        """Return ``mean_<key>_s`` over all blocks, and with `last` also ``last_<key>_s``."""
        result: dict[str, float] = {}
        for key, timer in self._timers.items():
            if mean:
                result[f"mean_{key}_s"] = timer.total_s / timer.count
            if last:
                result[f"last_{key}_s"] = timer.last
        return result
