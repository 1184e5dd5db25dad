"""The components of the driver that supervise one group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from raysgd._internal.context import Progress
from raysgd.cluster.worker_group import WorkerGroup
from raysgd.cluster.worker_handle import WorkerHandle
from raysgd.comm.backend import Backend
from raysgd.elastic.call import Call
from raysgd.elastic.commands import Commands
from raysgd.elastic.config import ElasticConfig
from raysgd.elastic.journal import Journal
from raysgd.elastic.policies import Recovery
from raysgd.elastic.preemption import PreemptionWatch
from raysgd.elastic.replacement import Replacement
from raysgd.elastic.scale_up import ScaleUp
from raysgd.elastic.shares import Shares
from raysgd.elastic.snapshots import SnapshotKeeper


class Feature(Protocol):
    """Observes the group, without waiting. `Controller` creates each feature."""

    def poll(self, progress: Mapping[WorkerHandle, Progress]) -> None:
        """Check the group. `progress` has the members that answer; it is empty before a call."""


@dataclass(kw_only=True, eq=False)
class DriverContext:
    """The components of the driver that supervise one group, and the running call."""

    group: WorkerGroup
    backend: Backend | None
    elastic: ElasticConfig
    recovery: Recovery
    timeout_s: float
    check_open: Callable[[], None]
    journal: Journal
    commands: Commands
    snapshots: SnapshotKeeper
    preemption: PreemptionWatch
    scale_up: ScaleUp
    shares: Shares
    call: Call = field(default_factory=Call)
    leaving: list[WorkerHandle] = field(default_factory=list)
    """Members that leave the group at the next restart."""
    has_state: bool = False
    """Whether the snapshot is the newest state of the workers."""
    pause_step: int | None = None
    """Step at which all workers of the generation will pause."""

    @property
    def features(self) -> list[Feature]:
        return [self.snapshots, self.preemption, self.scale_up, self.shares]

    def who_moves(self) -> tuple[list[Replacement], list[WorkerHandle]]:
        """Return the replacements that join at the next step, and the members that leave."""
        ready = self.scale_up.ready()
        leaving = self.preemption.who_leaves(len(ready))
        num_places = self.group.options.num_workers - len(self.group.members) + len(leaving)
        return ready[:num_places], leaving

    def discard_members(self) -> None:
        for member in list(self.group.members):
            self.group.discard(member)
