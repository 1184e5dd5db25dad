"""The interface of driver-side features: preemption, snapshots, hangs, pauses, scale-up."""

from __future__ import annotations

from collections.abc import Mapping

from raysgd._internal.context import Progress
from raysgd.cluster.worker_handle import WorkerHandle
from raysgd.elastic.machine import Event

__all__ = ["Feature"]


class Feature:
    """Observes the group.

    To add a feature, create it in `Controller` and list it in `DriverContext`.
    """

    def poll(self, progress: Mapping[WorkerHandle, Progress]) -> Event | None:
        """Check the group. Return an event if the call cannot continue.

        During a call, `progress` has the members that answer. Before a call, it is empty.
        """
        return None
