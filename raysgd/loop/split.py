"""In how many parts batches are trained since memory ran out, and when fewer are tried."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

__all__ = ["Split"]

_TRIED_EVERY = 200
"""After how many steps to try half as many parts."""


@dataclass(frozen=True)
class Split:
    """What all workers agree on. All that it holds are counts, which are saved with the position.

    >>> split = Split().raised(4, step=10)
    >>> split.eased(step=209, epoch=0) is split
    True
    >>> split.eased(step=210, epoch=0)
    Split(factor=2, since=210, tried=1, failed=0)
    """

    factor: int = 1
    """Parts of each batch."""
    since: int = 0
    """Committed steps when that was last changed."""
    tried: int = 0
    """The epoch, from 1, in which fewer parts were last tried; 0: they were not."""
    failed: int = 0
    """Whether memory has run out since; 1 if it has."""

    def raised(self, factor: int, step: int) -> Split:
        """Return the split after memory has run out."""
        if factor <= self.factor:
            return self
        return replace(self, factor=factor, since=step, failed=int(self.tried > 0))

    def eased(self, step: int, epoch: int) -> Split:
        """Return the split for the steps that follow `step`: with fewer parts where it is time.

        Where fewer were not enough, they are tried once an epoch.
        """
        if self.factor == 1 or step - self.since < _TRIED_EVERY:
            return self
        if self.failed and self.tried == epoch + 1:
            return self
        return replace(self, factor=self.factor // 2, since=step, tried=epoch + 1)

    def state(self) -> dict[str, int]:
        """Return what is saved; nothing where memory has never run out."""
        return {} if self == Split() else asdict(self)
