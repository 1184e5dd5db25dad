"""The interface between raysgd and the libraries that workers communicate through."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from raysgd._internal.context import WorkerContext

__all__ = ["Backend"]


class Backend(ABC):
    """Connects the workers of one generation.

    The driver creates one object with ``Class(name, timeout_s)`` and pickles it to each worker, so
    it must be picklable before the first `prepare`. For each generation, the driver calls `prepare`
    once and sends the rendezvous to every worker.

    For PyTorch operators, `setup` must create the default process group of ``torch.distributed``.
    Only Horovod is exempt: ``raysgd/torch/collectives.py`` handles it.
    """

    rejoins = True
    """Whether a process can join another generation. If not, each change of the group restarts all
    workers."""

    @abstractmethod
    def prepare(self, addresses: Sequence[str]) -> Any:
        """Create the rendezvous of one generation, on the driver.

        Args:
            addresses: IP addresses of the workers' nodes, by rank.

        Returns:
            The picklable argument for `setup` on the workers.
        """

    @abstractmethod
    def setup(self, context: WorkerContext, rendezvous: Any) -> None:
        """Join the generation, on a worker. Return when all workers have joined.

        If `rendezvous` is None, the worker forms a group of one.
        """

    def met(self) -> None:  # noqa: B027  optional
        """Release what the workers needed to connect.

        Runs on the driver after all workers have joined.
        """

    @abstractmethod
    def interrupt(self) -> None:
        """Make all current and later collectives of this generation fail, on a worker.

        Runs in another thread than the blocked one, and must not block.
        """

    @abstractmethod
    def teardown(self) -> None:
        """Leave the generation, on a worker. Does nothing without a `setup`."""

    @abstractmethod
    def is_communication_error(self, error: BaseException) -> bool:
        """Return whether `error` means that communication with another worker failed."""

    def advice(self, error: BaseException) -> str:
        """Return advice for an error that was caused by the end of an earlier generation."""
        return ""

    def collective(self) -> int | None:
        """Return the number of the collective that this worker waits in, or None.

        Runs in another thread than the waiting one. A backend that cannot know returns None. The
        driver then detects a stuck worker only by the timeout of the collective.
        """
        return None

    def close(self) -> None:  # noqa: B027  optional
        """Release the resources that `prepare` allocated. Runs on the driver."""
