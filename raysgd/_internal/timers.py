"""Wall-clock timers for the stages of a training step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class TimerStat:
    """Times blocks of code: ``with timer: ...``. `last` is the newest duration in seconds."""

    def __init__(self) -> None:
        self._started = 0.0
        self.count = 0
        self.total_s = 0.0
        self.last = 0.0

    def __enter__(self) -> TimerStat:
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.push(time.perf_counter() - self._started)

    def push(self, seconds: float) -> None:
        self.last = seconds
        self.count += 1
        self.total_s += seconds

    @property
    def mean(self) -> float:
        return self.total_s / self.count if self.count else 0.0


class TimerCollection:
    """Timers by name: ``with timers.record("fwd"): ...``. Almost free if disabled."""

    def __init__(self) -> None:
        self._timers: dict[str, TimerStat] = {}
        self.enabled = True

    def reset(self) -> None:
        self._timers.clear()

    def record(self, key: str) -> contextlib.AbstractContextManager[object]:
        """Return a context manager that times its block under `key`."""
        return self._record(key) if self.enabled else contextlib.nullcontext()

    @contextlib.contextmanager
    def _record(self, key: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._timers.setdefault(key, TimerStat()).push(time.perf_counter() - started)

    def stats(self) -> dict[str, float]:
        """Return ``mean_<key>_s`` of each timer."""
        return {f"mean_{key}_s": timer.mean for key, timer in self._timers.items()}
