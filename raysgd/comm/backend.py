"""The seam between workers and whatever they communicate through."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from raysgd._internal.context import WorkerContext

__all__ = ["Backend"]


class Backend(ABC):
    """How the workers of one generation find each other and talk.

    The driver calls `prepare` once a generation and sends the rendezvous to every worker. One
    object is made on the driver, by ``Class(name, timeout_s)``, and pickled to each worker before
    `prepare` is called, so it must be picklable then.

    For operators of torch the default process group of ``torch.distributed`` must exist after
    `setup`: gradients, buffers and counts go through it. (Horovod is the one exception, see
    ``raysgd/torch/collectives.py``.)
    """

    rejoins = True
    """Whether a process that was in one generation can be in the next. Where it cannot, all
    workers are started anew when the group changes or is broken."""

    @abstractmethod
    def prepare(self, addresses: Sequence[str]) -> Any:
        """Make a rendezvous for one generation. Runs on the driver.

        Args:
            addresses: IP addresses of the workers' nodes, in the order of their ranks.

        Returns:
            What `setup` needs on the workers; it is pickled.
        """

    @abstractmethod
    def setup(self, context: WorkerContext, rendezvous: Any) -> None:
        """Join the generation. Runs on every worker, returns when all have joined.

        Without a rendezvous, None, the worker is alone: a group of one.
        """

    def met(self) -> None:  # noqa: B027  most backends are asked for addresses later as well
        """Let go of what the workers met by, as all have joined. Runs on the driver."""

    @abstractmethod
    def interrupt(self) -> None:
        """Make collectives that are under way, and all later ones of this generation, fail.

        Runs on a worker in another thread than the one that is blocked. Must not block.
        """

    @abstractmethod
    def teardown(self) -> None:
        """Leave the generation. Runs on every worker; harmless when nothing was set up."""

    @abstractmethod
    def is_communication_error(self, error: BaseException) -> bool:
        """Whether `error` says that talking to other workers failed."""

    def advice(self, error: BaseException) -> str:
        """Return what to do about an error that follows from the end of an earlier generation."""
        return ""

    def collective(self) -> int | None:
        """Return the number of the collective in which this worker waits for all the others.

        Runs on a worker in another thread than the one that waits. None where it is in none, or
        where the backend cannot tell; the driver then finds no worker waiting in vain before the
        collective's timeout.
        """
        return None

    def close(self) -> None:  # noqa: B027  most backends keep nothing on the driver
        """Let go of what `prepare` made. Runs on the driver."""
