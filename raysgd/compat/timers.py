"""The timer of RaySGD v1, for older scripts."""

from __future__ import annotations

import collections
import time


class TimerStat:
    """Times a block of code: ``with timer: ...``.

    ``count`` and ``total_s`` cover all blocks. The other values cover the last `window_size`
    blocks, in seconds, and are 0 without blocks. Units are what a block processed, such as samples.

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
            raise RuntimeError("This TimerStat is running. Use another timer for a nested block.")
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._started is not None
        self.push(time.perf_counter() - self._started)
        self._started = None

    def push(self, seconds: float) -> None:
        self._samples.append(seconds)
        self.count += 1
        self.total_s += seconds

    def push_units_processed(self, units: float) -> None:
        self._units.append(units)

    def has_units_processed(self) -> bool:
        return bool(self._units)

    @property
    def mean(self) -> float:
        return sum(self._samples) / len(self._samples) if self._samples else 0.0

    @property
    def median(self) -> float:
        ordered = sorted(self._samples)
        return ordered[len(ordered) // 2] if ordered else 0.0

    @property
    def sum(self) -> float:
        return sum(self._samples)

    @property
    def max(self) -> float:
        return max(self._samples, default=0.0)

    @property
    def first(self) -> float:
        return self._samples[0] if self._samples else 0.0

    @property
    def last(self) -> float:
        return self._samples[-1] if self._samples else 0.0

    @property
    def size(self) -> int:
        return len(self._samples)

    @property
    def mean_units_processed(self) -> float:
        return sum(self._units) / len(self._units) if self._units else 0.0

    @property
    def mean_throughput(self) -> float:
        return sum(self._units) / self.sum if self._units and self.sum > 0 else 0.0

    def reset(self) -> None:
        self._samples.clear()
        self._units.clear()
        self.count, self.total_s = 0, 0.0
