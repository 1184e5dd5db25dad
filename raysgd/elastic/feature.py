"""The interface of the driver-side features: preemption, snapshots, hangs, pauses, scale-up."""

from __future__ import annotations

from collections.abc import Mapping

from raysgd._internal.context import Progress
from raysgd.cluster.worker_handle import WorkerHandle
from raysgd.elastic.machine import Event

__all__ = ["Feature"]


class Feature:
    """Observes the group. Each method does nothing by default.

    To add a feature, write one file, make it in `Controller`, and list it in `DriverContext`.
    """

    def poll(self, progress: Mapping[WorkerHandle, Progress]) -> Event | None:
        """Look at the group; return an event if the call under way cannot continue as it is.

        Args:
            progress: of the members that answer, during a call; empty before a call.
        """
        return None

    def on_loss(self, member: WorkerHandle, error: BaseException) -> None:
        """React to a lost member, which is still in the group."""

    def on_generation(self, number: int) -> None:
        """React to the begin of a generation."""
