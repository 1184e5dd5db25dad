"""Recovery policies: group sizes, ranks, and the rank with the newest state."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from raysgd._internal.runner import WorkerContext
from raysgd._internal.worker_status import WorkerStatus
from raysgd.cluster.worker import WorkerLocation
from raysgd.elastic.config import ElasticConfig

_Member = TypeVar("_Member")


@dataclass(frozen=True, kw_only=True)
class RecoveryPolicy:
    """How a group continues after a failure. It does not change during a run."""

    elastic: ElasticConfig
    """The choices of the user."""
    process_can_rejoin: bool
    """Whether a process can join a second process group. Otherwise any failure restarts all
    workers."""
    supports_live_join: bool
    """Whether workers can join a call and copy the state of the others, as with operators."""
    replaces_workers: bool
    """Whether replacement workers may start."""
    keeps_snapshots: bool
    """Whether all workers can restart from a snapshot."""

    @property
    def rescues_state(self) -> bool:
        """Whether a restart uses the state of a survivor. Otherwise it uses the snapshot."""
        return self.supports_live_join and not self.process_can_rejoin

    @property
    def survivors_stay(self) -> bool:
        """Whether survivors keep their processes and state, and replacement workers join them."""
        return self.supports_live_join and self.process_can_rejoin


def assign_contexts(
    locations: Sequence[WorkerLocation],
    *,
    generation: int,
    has_process_group: bool,
    num_cpus: float,
) -> list[WorkerContext]:
    """Assign ranks: world ranks in the order of `locations`, local ranks by node.

    All workers of a node see all of its GPUs in one order, so that NCCL can use direct paths
    between them. Each worker gets the index of its own GPU.
    """
    ranks_on: dict[str, list[int]] = {}
    for rank, location in enumerate(locations):
        ranks_on.setdefault(location.node_id, []).append(rank)
    contexts = {}
    for node_rank, ranks in enumerate(ranks_on.values()):
        gpus = {gpu for rank in ranks for gpu in locations[rank].gpu_ids}
        visible = tuple(sorted(gpus, key=lambda gpu: (len(gpu), gpu)))
        for local_rank, rank in enumerate(ranks):
            location = locations[rank]
            contexts[rank] = WorkerContext(
                world_rank=rank,
                world_size=len(locations),
                local_rank=local_rank,
                local_world_size=len(ranks),
                node_rank=node_rank,
                generation=generation,
                has_process_group=has_process_group,
                num_cpus=num_cpus,
                is_in_driver=location.is_in_driver,
                node_ip=location.node_ip,
                visible_gpus=visible,
                gpu_index=visible.index(location.gpu_ids[0]) if location.gpu_ids else None,
            )
    return [contexts[rank] for rank in range(len(locations))]


def newest_status(statuses: Iterable[WorkerStatus]) -> WorkerStatus:
    """Return the status of the first worker among those with the most committed steps.

    A survivor may have finished the step in which another worker failed. A damaged state counts
    only if there is no other.
    """
    return max(statuses, key=_seniority)


def _seniority(status: WorkerStatus) -> tuple[bool, int]:
    return status.state_status.condition == "good", status.position.global_step


def choose_leader(
    statuses: Mapping[_Member, WorkerStatus], leaving: Collection[_Member]
) -> tuple[_Member, list[_Member]]:
    """Return the member whose state counts, and the members that stay.

    If only a leaving worker has the state, it stays.

    >>> from raysgd._internal.worker_status import ReportedPosition
    >>> five, six = (WorkerStatus(ReportedPosition(global_step=step)) for step in (5, 6))
    >>> choose_leader({"a": five, "b": five}, {"a"})
    ('b', ['b'])
    >>> choose_leader({"a": six, "b": five}, {"a"})
    ('a', ['a', 'b'])
    """
    seniority = {member: _seniority(each) for member, each in statuses.items()}
    leader = max(seniority, key=seniority.__getitem__)
    staying = [member for member in statuses if member not in leaving] or list(statuses)
    first = max(staying, key=seniority.__getitem__)
    is_behind = seniority[first] < seniority[leader]
    return (leader, list(statuses)) if is_behind else (first, staying)


def state_senders(statuses: Mapping[_Member, WorkerStatus]) -> list[list[_Member]]:
    """Return the sets of members that can send the state: any member, or all if it is sharded.

    >>> state_senders({"a": WorkerStatus(), "b": WorkerStatus()})
    [['a'], ['b']]
    """
    if not all(each.state_status.is_complete for each in statuses.values()):
        return [list(statuses)]
    return [[member] for member in statuses]


def backoff_s(attempt: int, config: ElasticConfig) -> float:
    """Return the seconds to wait after a failure. `attempt` counts from 0.

    >>> [backoff_s(n, ElasticConfig(backoff_max_s=5.0)) for n in range(4)]
    [1.0, 2.0, 4.0, 5.0]
    """
    return min(config.backoff_max_s, config.backoff_initial_s * 2.0 ** min(attempt, 60))


def choose_pause_step(statuses: Sequence[WorkerStatus], lead_s: float) -> int:
    """Return a step at which all workers can pause together, `lead_s` seconds ahead.

    Workers are at most one step apart.
    """
    first = max(statuses, key=lambda p: p.position.global_step)
    step_s = first.measured.step_s
    return first.position.global_step + 2 + (math.ceil(lead_s / step_s) if step_s > 0 else 0)
