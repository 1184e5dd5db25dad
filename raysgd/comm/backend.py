"""The interface between raysgd and the libraries that workers communicate through."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from raysgd._internal.runner import WorkerContext


class CollectiveBackend(ABC):
    """Connects the workers of one generation.

    The driver creates one object with ``Class(name, timeout_s)`` and pickles it to each worker. For
    each generation, the driver calls `create_rendezvous` once and sends the result to every worker.

    For PyTorch operators, `setup` must create the default process group of ``torch.distributed``.
    (``raysgd/torch/collectives.py`` handles Horovod.)
    """

    process_can_rejoin = True
    """Whether a process can join another generation later. If not, each change of the group
    restarts all workers."""
    _server: Any = None  # of the rendezvous, on the driver

    @abstractmethod
    def create_rendezvous(self, addresses: Sequence[str]) -> Any:
        """Return the picklable rendezvous of one generation, on the driver.

        `addresses` are the IP addresses of the workers' nodes, by rank.
        """

    @abstractmethod
    def setup(self, context: WorkerContext, rendezvous: Any) -> None:
        """Join the generation, on a worker, and wait for the other workers.

        If `rendezvous` is None, the worker forms a group of one.
        """

    def release_rendezvous(self) -> None:  # noqa: B027  optional
        """Release what only joining needs. Runs on the driver when all workers have joined."""

    @abstractmethod
    def interrupt(self) -> None:
        """Make all current and later collectives of this generation fail, on a worker.

        Runs in another thread than the collectives, and must not block.
        """

    @abstractmethod
    def teardown(self) -> None:
        """Leave the generation, on a worker. Does nothing without a `setup`."""

    @abstractmethod
    def is_communication_error(self, error: BaseException) -> bool:
        """Return whether `error` means that communication with another worker failed."""

    def advice_for(self, error: BaseException) -> str:
        """Return advice if repeating the call would raise `error` again, otherwise ""."""
        return ""

    def current_collective(self) -> int | None:
        """Return the number of the collective that this worker waits in, or None.

        Runs in another thread than the collective. If this method always returns None, only the
        timeout of the collective detects a stuck worker.
        """
        return None

    def link_speeds(self) -> Mapping[str, float]:
        """Return recent bytes per second of sending to other hosts, by address.

        Runs in another thread than the collectives. Without values, raysgd cannot name a slow link.
        """
        return {}

    def close(self) -> None:
        """Release the resources that `create_rendezvous` allocated. Runs on the driver."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
