"""Preemption: which workers will be preempted, and when they leave the group."""

import math
from collections.abc import Mapping

from raysgd._internal.worker_status import WorkerStatus
from raysgd.cluster.worker_handle import WorkerHandle
from raysgd.elastic.group_record import GroupRecord

_LEAVE_S = 3.0
"""Seconds that workers may take to leave the group, in addition to a few steps."""


class PreemptionMonitor:
    """Watches notices of preemption, and decides which of the preempted workers leave now.

    Without live joins, replacement workers cannot take over from those that leave.
    """

    def __init__(self, record: GroupRecord) -> None:
        self._group, self._record = record.group, record
        self._step_s = 0.0
        self._announced: set[tuple[WorkerHandle, str]] = set()  # with causes
        self.must_save = False
        """Whether to save soon: workers leave before any worker can replace them."""

    def record_save(self) -> None:
        self.must_save = False

    def drain(self, node_id: str | None, rank: int | None, deadline_s: float | None) -> None:
        members = list(self._group.members)
        if node_id is not None:
            known = {member.location.node_id for member in members}
            if node_id not in known:  # ask Ray, which may not answer soon
                known |= self._group.node_traits().keys()
            if node_id not in known:
                there = ", ".join(sorted(known)) or "none"
                raise ValueError(f"drain(node_id={node_id!r}): must be one of the nodes {there}.")
            self._group.notices.drain(node_id, deadline_s)
            return
        if rank is None or not 0 <= rank < len(members):
            allowed = f"must be from 0 to {len(members) - 1}" if members else "no worker is left"
            raise ValueError(f"drain(rank={rank!r}): {allowed}.")
        if not members[rank].is_remote:
            raise ValueError(
                f"drain(rank={rank}): this worker is in the driver's process (use_local). Only "
                "workers in other processes can be replaced."
            )
        self._group.notices.drain(members[rank], deadline_s)

    def observe(self, statuses: Mapping[WorkerHandle, WorkerStatus]) -> None:
        step_s = max((p.measured.step_s for p in statuses.values()), default=0.0)
        self._step_s = step_s or self._step_s
        for member, each in statuses.items():
            if each.process.terminated_s is not None:
                self._group.notices.record_sigterm(member, each.process.terminated_s)
        preempted = self._group.preempted()
        news = {m: each for m, each in preempted.items() if (m, each.cause) not in self._announced}
        self._announced |= {(member, notice.cause) for member, notice in news.items()}
        self._announced = {(m, cause) for m, cause in self._announced if m in preempted}
        for notice in dict.fromkeys(news.values()):
            concerned = [member for member in news if news[member] == notice]
            left_s = max(0.0, notice.deadline - self._group.clock.time())
            seconds = left_s if math.isfinite(left_s) else 0.0
            self._record.add_event("draining", concerned, cause=notice.cause, seconds=seconds)
        if news:
            is_urgent = any(notice.deadline <= self._urgent_until for notice in news.values())
            num_staying = len(self._group.members) - len(preempted)
            self.must_save |= is_urgent or num_staying < max(1, self._group.options.min_workers)

    @property
    def _urgent_until(self) -> float:
        return self._group.clock.time() + _LEAVE_S + 4 * self._step_s

    def due_to_leave(self, num_ready: int) -> list[WorkerHandle]:
        """Return the members that leave at the next step if `num_ready` workers can join.

        A worker with a replacement leaves immediately. A worker without one leaves shortly before
        its deadline. At least ``min_workers`` stay. Unless the group has only one worker, at least
        one of its members stays, because it has the state.
        """
        preempted = self._group.preempted() if self._record.policy.supports_live_join else {}
        in_order = sorted(preempted, key=lambda member: preempted[member].deadline)
        due = [m for m in in_order[num_ready:] if preempted[m].deadline <= self._urgent_until]
        num_workers = len(self._group.members)
        most = min(num_workers + num_ready - self._group.options.min_workers, num_workers - 1)
        if num_workers == 1:
            most = min(num_ready, 1)
        return [*in_order[:num_ready], *due][: max(0, most)]
