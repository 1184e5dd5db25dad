"""The components of the driver that supervise one group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raysgd._internal.progress import Progress
from raysgd.cluster.actor_group import ActorGroup
from raysgd.cluster.worker_handle import WorkerHandle
from raysgd.comm.backend import CollectiveBackend
from raysgd.elastic.call import Call
from raysgd.elastic.commands import Commands
from raysgd.elastic.config import ElasticConfig
from raysgd.elastic.group_record import GroupRecord
from raysgd.elastic.policies import Policy
from raysgd.elastic.preemption import PreemptionWatch
from raysgd.elastic.scale_up import ScaleUp
from raysgd.elastic.share_balancer import ShareBalancer
from raysgd.elastic.snapshots import SnapshotKeeper
from raysgd.elastic.speed_monitor import SpeedMonitor


class DriverComponents:
    """The components of the driver that supervise one group, and the running call."""

    def __init__(
        self,
        group: ActorGroup,
        backend: CollectiveBackend | None,
        config: ElasticConfig,
        policy: Policy,
        create_arguments: Sequence[Any],
        timeout_s: float,
        check_open: Callable[[], None],
    ) -> None:
        self.group, self.backend, self.config = group, backend, config
        self.policy, self.timeout_s, self.check_open = policy, timeout_s, check_open
        self.record = record = GroupRecord(group, policy.survivors_stay)
        self.commands = Commands(group, record, check_open, timeout_s)
        self.snapshots = SnapshotKeeper(group)
        self.preemption = PreemptionWatch(group, record, policy.supports_live_join)
        self.scale_up = ScaleUp(group, config, record, policy, create_arguments, timeout_s)
        self.share_balancer = ShareBalancer(group, config, record)
        self.speed = SpeedMonitor(group)
        self.call = Call()
        """The running call. Only `Supervision.set_call` sets it."""

    def advance(self, progress: Mapping[WorkerHandle, Progress]) -> None:
        """Let the components check the group, without waiting.

        They use the progress of the members that answered, which is empty before a call.
        """
        self.snapshots.request_newer(progress)
        self.preemption.observe(progress)
        self.scale_up.advance_if_allowed()
        self.share_balancer.observe(progress)
        self.speed.observe(progress)

    def due_changes(self) -> tuple[list[WorkerHandle], list[WorkerHandle]]:
        """Return the replacements that join at the next step, and the members that leave."""
        ready = self.scale_up.ready_workers()
        leaving = self.preemption.due_to_leave(len(ready))
        num_vacant = self.group.options.num_workers - len(self.group.members) + len(leaving)
        return ready[:num_vacant], leaving
