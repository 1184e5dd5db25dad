"""How the batch of a step is cut into parts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepLayout:
    """The parts of each step of a group: by workers, or a fixed number.

    By workers, each worker trains one part. Fixed parts do not depend on the workers: a worker
    trains the parts that it owns one after the other, and the generators of random numbers are
    seeded for each.
    """

    num_parts: int | None = None  # of a full step; None: one for each current worker
    is_fixed: bool = False  # fewer workers train as many parts, as for equal bits

    def full_size(self, num_workers: int) -> int:
        """Return the number of parts that define the size of a step."""
        return self.num_parts or num_workers

    def current_size(self, num_workers: int) -> int:
        """Return the number of parts that `num_workers` workers train in a step."""
        return self.full_size(num_workers) if self.is_fixed else num_workers


BY_WORKERS = StepLayout()
"""A step has a part for each current worker, so that its size depends on their number."""
