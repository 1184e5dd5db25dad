"""Threads that stay in one call of a library, whose work nobody can see from outside."""

from __future__ import annotations

import sys
import time
from types import FrameType

__all__ = ["Calls"]


class Calls:
    """Notes how long threads have been in their newest call of a library.

    Args:
        part: of the paths of the library's files.
    """

    def __init__(self, part: str) -> None:
        self._part = part
        self._seen: dict[int, tuple[FrameType, int, float]] = {}

    def longest_s(self) -> float:
        """Return for how long a thread has been in one call, in seconds; 0 where none is in one.

        Counted from the first time that this was asked while it was there.
        """
        before, self._seen, now = self._seen, {}, time.monotonic()
        for thread, frame in sys._current_frames().items():
            if self._part not in frame.f_code.co_filename:
                continue
            seen = before.get(thread)
            # a frame that is held here is not used again for another call
            if seen is None or seen[0] is not frame or seen[1] != frame.f_lasti:
                seen = (frame, frame.f_lasti, now)
            self._seen[thread] = seen
        return max((now - since for _, _, since in self._seen.values()), default=0.0)
