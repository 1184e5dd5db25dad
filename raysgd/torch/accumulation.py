"""Groups of batches that make one update together: pure arithmetic."""

from __future__ import annotations

import math
import numbers
from typing import Any

__all__ = ["Group", "check_count"]


class Group:
    """Weighs the losses of the batches of a group, so that they add up to one mean.

    The loss of a batch is a mean over its samples. Weighted with ``samples of the batch / samples
    of the group`` the losses add up to the mean over the group: that of one large batch. How many
    samples a group has is known with its last batch; until then the group is taken to consist of
    batches like its first, and where that was wrong the gradients held are corrected once.

    >>> group = Group()
    >>> group.begin(0, 2, is_last=False)
    >>> group.weigh(6)
    (1.0, 0.5)
    >>> group.begin(1, 2, is_last=True)
    >>> group.weigh(2)  # 2 of 8 samples, and the first batch counts for 6 / 8, not for 1 / 2
    (1.5, 0.25)
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Let each batch be a group of its own, until `begin` says otherwise."""
        self.position = 0
        """Batches of the group before this one."""
        self.is_last = True
        """Whether an update follows this batch."""
        self._counts: bool | None = None
        self._planned = 1
        self._taken_as = 0.0
        self._held = 0.0
        self._this: float | None = None

    def begin(self, position: int, planned: int, is_last: bool) -> None:
        """Begin a batch.

        Args:
            position: batches of the group before it.
            planned: batches that the group will have, or the most where that is unknown.
            is_last: whether it is the last of the group.
        """
        if position == 0:
            self.reset()
        self._held += self._this or 0.0
        self._this = None
        self.position, self._planned, self.is_last = position, planned, is_last

    @property
    def has_backward(self) -> bool:
        """Whether this batch has had a backward pass."""
        return self._this is not None

    @property
    def holds(self) -> bool:
        """Whether batches before this one have had backward passes."""
        return self._held > 0

    def weigh(self, num_samples: float | None) -> tuple[float, float]:
        """Return by what to multiply the gradients that are held, and the loss at hand.

        Args:
            num_samples: samples of the batch; None to give all batches the same weight. A
                further loss of the same batch has the weight of the first.

        Raises:
            ValueError: if it does not fit what was given for another loss of the group.
        """
        size = self._checked(num_samples)
        if self._this is not None:
            return 1.0, self._this / self._taken_as
        self._this = size
        if self._held == 0:
            self._taken_as = self._planned * size
        correction = 1.0
        total = self._held + size
        if self.is_last and total != self._taken_as:
            correction, self._taken_as = self._taken_as / total, total
        return correction, size / self._taken_as

    def _checked(self, num_samples: float | None) -> float:
        if self._this is None:
            if self._counts is not None and self._counts != (num_samples is not None):
                raise ValueError(
                    "backward(num_samples=...) was given for some batches of an accumulation "
                    "group and not for others; give it for all of them or for none."
                )
            self._counts = num_samples is not None
        elif num_samples is not None and num_samples != self._this:
            raise ValueError(
                f"backward(num_samples={num_samples!r}) follows num_samples={self._this:g} for "
                "another loss of the same batch; the batch has one number of samples."
            )
        return 1.0 if num_samples is None else float(num_samples)


def check_count(num_samples: Any) -> None:
    """Check what ``backward`` was given as ``num_samples``."""
    if num_samples is None:
        return
    if isinstance(num_samples, bool) or not isinstance(num_samples, numbers.Real):
        raise TypeError(f"backward(num_samples={num_samples!r}): must be a number.")
    if not 0 < float(num_samples) < math.inf:
        raise ValueError(f"backward(num_samples={num_samples!r}): must be above 0 and finite.")
