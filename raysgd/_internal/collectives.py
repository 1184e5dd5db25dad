"""How the workers of a group agree, apart from gradients."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any


class Collectives(ABC):
    """Exchanges numbers and states between the workers. Every rank must call each method.

    PyTorch and Keras have their own.
    """

    @abstractmethod
    def all_reduce_min(self, *values: int) -> list[int]:
        """Return the smallest number of all ranks for each value."""

    @abstractmethod
    def broadcast(self, make: Callable[[], Any], src: int) -> Any:
        """Call `make` on rank `src`, and return its result on all ranks."""

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.all_reduce_min(0)

    def any_rank(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return self.all_reduce_min(-int(flag))[0] < 0

    def all_ranks_equal(self, number: int) -> bool:
        """Return whether all ranks pass the same number."""
        low, of_negative = self.all_reduce_min(number, -number)
        return low == -of_negative
