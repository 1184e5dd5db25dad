"""The steps of optimizers in one update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raysgd.loop.transaction import UpdateTransaction


class OptimizerSteps:
    """Counts the steps of optimizers in an update, and knows how many an update usually has."""

    def __init__(self, tx: UpdateTransaction) -> None:
        self._tx = tx
        self.optimizers: Sequence[Any] = ()
        self._most: dict[int, int] = {}  # steps of an update that counts, by ID of the optimizer
        self.reset()

    def reset(self) -> None:
        self.running: Any = None  # the optimizer whose step runs
        self.in_helper = False  # the optimizer's step runs within ``optimizer_step``
        self.requested: set[int] = set()
        """IDs of the optimizers whose step was requested in this micro-batch."""
        self.done: defaultdict[int, int] = defaultdict(int)
        """Number of steps by the ID of each optimizer that has stepped."""
        self.are_skipped = False  # all of them, for lack of items

    def end(self, optimizer: Any) -> None:
        """End a step of an optimizer, also one that was skipped."""
        tx = self._tx
        self.running, is_empty = None, tx.weights.is_empty
        self.are_skipped = is_empty and (self.are_skipped or not self.done)
        tx.weights.end_optimizer_step()
        if tx.is_open:
            self.done[id(optimizer)] += 1

    def commit(self) -> None:
        for key, count in self.done.items():
            if count > self._most.get(key, 0):
                self._most[key] = count

    @property
    def are_several(self) -> bool:
        """Whether optimizers make several steps in all, so that a failure can come between."""
        if self._tx.has_fixed_parts:
            return True  # a worker can be lost between its step and the commit
        return len(self.optimizers) > 1 or max(self._most.values(), default=0) > 1

    @property
    def are_complete(self) -> bool:
        """Whether every optimizer has made the most steps of an earlier update, at least one.

        The steps then count, even if the loop raises.
        """
        if self._tx.has_fixed_parts or self.running is not None or not self.optimizers:
            return False
        usual = {id(each): self._most.get(id(each), 1) for each in self.optimizers}
        return all(self.done.get(key, 0) >= count for key, count in usual.items())

    @property
    def have_ever_counted(self) -> bool:
        """Whether some update that counts had a step of an optimizer."""
        return bool(self._most)
