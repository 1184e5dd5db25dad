"""Threads that stay in one call of a library, whose work nobody can see from outside."""

from __future__ import annotations

import os
import sys
import time
from types import FrameType

__all__ = ["Calls"]


class Calls:
    """Notes how long threads have been in their newest call of a library.

    Args:
        module: the library, or a part of it, by its name of import.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._seen: dict[int, tuple[FrameType, int, float]] = {}

    def longest_s(self) -> float:
        """Return for how long a thread has been in one call, in seconds; 0 where none is in one.

        Counted from the first time that this was asked while it was there.
        """
        place = self._place()
        if place is None:
            return 0.0
        before, now = self._seen, time.monotonic()
        found: dict[int, tuple[FrameType, int, float]] = {}
        for thread, frame in sys._current_frames().items():
            if not frame.f_code.co_filename.startswith(place):
                continue
            seen = before.get(thread)
            # a frame that is held here is not used again for another call
            if seen is None or seen[0] is not frame or seen[1] != frame.f_lasti:
                seen = (frame, frame.f_lasti, now)
            found[thread] = seen
        self._seen = found  # whole: several threads may ask
        return max((now - since for _, _, since in found.values()), default=0.0)

    def _place(self) -> str | None:
        """Return the library's folder, or file; None where it is not imported."""
        file: str | None = getattr(sys.modules.get(self._module), "__file__", None)
        if file is None:
            return None
        folder, name = os.path.split(file)
        return folder + os.sep if name == "__init__.py" else file
