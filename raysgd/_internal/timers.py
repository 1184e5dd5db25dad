"""Wall-clock timers for the stages of a training step, and the timer of older scripts."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, median_high
from typing import Any

_OFF = contextlib.nullcontext()


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
        return self._record(key) if self.enabled else _OFF

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


def _statistic(of: Callable[[Sequence[float]], float], name: str = "_samples") -> Any:
    """Return a property: a statistic of the values in the window, or 0 without values."""
    return property(lambda timer: of(values) if (values := getattr(timer, name)) else 0.0)


class TimerStat:
    """Times a block of code: ``with timer: ...``. For scripts of RaySGD v1.

    ``count`` and ``total_s`` cover all blocks. The other values cover the last `window_size`
    blocks, in seconds, and are 0 without blocks. Units are what a block processed, such as samples.

    >>> timer = TimerStat()
    >>> with timer:
    ...     pass
    >>> timer.count
    1
    """

    mean = _statistic(fmean)
    median = _statistic(median_high)
    sum = _statistic(sum)
    max = _statistic(max)
    first = _statistic(lambda samples: samples[0])
    last = _statistic(lambda samples: samples[-1])
    mean_units_processed = _statistic(fmean, "_units")

    def __init__(self, window_size: int = 10) -> None:
        self._samples: deque[float] = deque(maxlen=window_size)
        self._units: deque[float] = deque(maxlen=window_size)
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
    def size(self) -> int:
        return len(self._samples)

    @property
    def mean_throughput(self) -> float:
        return sum(self._units) / self.sum if self.sum > 0 else 0.0

    def reset(self) -> None:
        self._samples.clear()
        self._units.clear()
        self.count, self.total_s = 0, 0.0
