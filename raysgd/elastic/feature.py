"""The interface of driver-side features: preemption, snapshots, scale-up, shares."""

from __future__ import annotations

from collections.abc import Mapping

from raysgd._internal.context import Progress
from raysgd.cluster.worker_handle import WorkerHandle


class Feature:
    """Observes the group.

    To add a feature, create it in `Controller` and list it in `DriverContext`.
    """

    def poll(self, progress: Mapping[WorkerHandle, Progress]) -> None:
        """Check the group, without waiting.

        During a call, `progress` has the members that answer. Before a call, it is empty.
        """
