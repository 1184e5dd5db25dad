"""Recovery policies: group sizes, ranks, and the rank with the newest state."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from raysgd._internal.context import Progress, WorkerContext
from raysgd.cluster.worker import WorkerInfo
from raysgd.elastic.config import ElasticConfig

_Member = TypeVar("_Member")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How a group continues after a failure. It does not change during a run."""

    process_can_rejoin: bool = True
    """Whether a process can join a second process group. Otherwise any failure restarts all
    workers."""
    supports_live_join: bool = True
    """Whether workers can join a call and copy the state of the others, as with operators."""
    max_attempts: int = 10
    """Number of times that workers may be lost before a call begins."""
    may_grow: bool = True
    keeps_snapshots: bool = True

    @property
    def rescues_state(self) -> bool:
        """Whether a restart uses the state of a survivor. Otherwise it uses the snapshot."""
        return self.supports_live_join and not self.process_can_rejoin

    @property
    def survivors_stay(self) -> bool:
        """Whether survivors keep their processes and state, and replacement workers join them."""
        return self.supports_live_join and self.process_can_rejoin


def assign_contexts(
    infos: Sequence[WorkerInfo], *, generation: int, distributed: bool, num_cpus: float
) -> list[WorkerContext]:
    """Assign ranks: world ranks in the order of `infos`, local ranks by node.

    All workers of a node see all of its GPUs in one order, so that NCCL can use direct paths
    between them. Each worker gets the index of its own GPU.
    """
    nodes = list(dict.fromkeys(info.node_id for info in infos))
    gpus = {
        node: tuple(
            sorted({gpu for p in infos if p.node_id == node for gpu in p.gpu_ids}, key=_gpu_key)
        )
        for node in nodes
    }
    seen = dict.fromkeys(nodes, 0)
    contexts = []
    for rank, info in enumerate(infos):
        visible = gpus[info.node_id]
        contexts.append(
            WorkerContext(
                world_rank=rank,
                world_size=len(infos),
                local_rank=seen[info.node_id],
                local_world_size=sum(p.node_id == info.node_id for p in infos),
                node_rank=nodes.index(info.node_id),
                generation=generation,
                distributed=distributed,
                num_cpus=num_cpus,
                in_driver=info.in_driver,
                node_ip=info.node_ip,
                visible_gpus=visible,
                gpu_index=visible.index(info.gpu_ids[0]) if info.gpu_ids else None,
            )
        )
        seen[info.node_id] += 1
    return contexts


def choose_leader(progress: Sequence[Progress]) -> int:
    """Return the lowest rank among the workers with the most committed steps.

    A survivor may have finished the step in which another worker failed. A damaged state counts
    only if there is no other.

    >>> choose_leader([Progress(global_step=4), Progress(global_step=5), Progress(global_step=5)])
    1
    """

    def key(rank: int) -> tuple[bool, int, int]:
        is_good = progress[rank].holdings.condition == "good"
        return is_good, progress[rank].global_step, -rank

    return max(range(len(progress)), key=key)


def choose_members(
    progress: Mapping[_Member, Progress], leaving: Collection[_Member]
) -> tuple[_Member, list[_Member]]:
    """Return the member whose state counts, and the members that stay.

    If only a leaving worker has the state, it stays.

    >>> choose_members({"a": Progress(global_step=5), "b": Progress(global_step=5)}, {"a"})
    ('b', ['b'])
    >>> choose_members({"a": Progress(global_step=6), "b": Progress(global_step=5)}, {"a"})
    ('a', ['a', 'b'])
    """
    members = list(progress)
    leader = members[choose_leader(list(progress.values()))]
    staying = [member for member in members if member not in leaving] or members
    first = staying[choose_leader([progress[member] for member in staying])]
    is_behind = progress[first].global_step < progress[leader].global_step
    if first != leader and (is_behind or progress[first].holdings.condition != "good"):
        return leader, members
    return first, staying


def leaders_progress(progress: Sequence[Progress]) -> Progress:
    """Return the progress of the worker that `choose_leader` picks."""
    return progress[choose_leader(progress)]


def members_to_ask(progress: Mapping[_Member, Progress]) -> list[list[_Member]]:
    """Return the sets of members that can send the state: any member, or all if it is sharded.

    >>> members_to_ask({"a": Progress(), "b": Progress()})
    [['a'], ['b']]
    """
    if all(each.holdings.complete for each in progress.values()):
        return [[member] for member in progress]
    return [list(progress)]


def backoff_s(attempt: int, config: ElasticConfig) -> float:
    """Return the seconds to wait after a failure. `attempt` counts from 0.

    >>> [backoff_s(n, ElasticConfig(max_s=5.0)) for n in range(4)]
    [1.0, 2.0, 4.0, 5.0]
    """
    return min(config.max_s, config.initial_s * 2.0 ** min(attempt, 60))


def pause_step(progress: Sequence[Progress], notice_s: float) -> int:
    """Return a step at which all workers can pause together, `notice_s` seconds ahead.

    Workers are at most one step apart.

    >>> slow, fast = Progress(global_step=7, step_s=0.05), Progress(global_step=8, step_s=0.05)
    >>> pause_step([slow, fast], notice_s=0.1)
    12
    """
    first = max(progress, key=lambda p: p.global_step)
    steps = math.ceil(notice_s / first.step_s) if first.step_s > 0 else 0
    return first.global_step + 2 + steps


def _gpu_key(gpu: str) -> tuple[int, int, str]:
    return (0, int(gpu), "") if gpu.isdigit() else (1, 0, gpu)
