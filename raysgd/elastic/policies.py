"""How many workers start, who is who in a generation, and whose state counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from raysgd._internal.context import Progress, WorkerContext
from raysgd.cluster.worker_info import WorkerInfo
from raysgd.elastic.config import ElasticConfig

__all__ = [
    "Recovery",
    "assign_contexts",
    "backoff_s",
    "choose_leader",
    "furthest",
    "may_resize",
    "pause_step",
    "recovery",
    "who_leaves",
]


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """How a group goes on after a failure."""

    survivors_stay: bool
    """Whether workers that are left after a loss keep their processes and their state. Otherwise
    all start anew."""
    rejoins: bool
    """Whether, where nobody is lost, workers make a new process group in their processes. Otherwise
    all start anew then, too."""
    rescues_state: bool
    """Whether all that start anew go on with the state of a worker that was left. Otherwise they go
    on from the snapshot."""
    replaces: bool
    """Whether replacement workers can take the state of the others and go on with them."""

    @property
    def joins(self) -> bool:
        """Whether workers can set up alone, and join the others in their processes."""
        return self.replaces and self.rejoins


def recovery(*, rejoins: bool, in_place: bool, can_join: bool) -> Recovery:
    """Return how a group goes on after a failure.

    Args:
        rejoins: whether a process that was in one process group can be in another.
        in_place: `ElasticConfig.in_place`.
        can_join: whether what the workers do can be joined while it is under way: training by an
            operator can, a training function cannot.

    >>> recovery(rejoins=True, in_place=True, can_join=True).survivors_stay
    True
    >>> recovery(rejoins=False, in_place=True, can_join=True).rescues_state
    True
    """
    return Recovery(
        survivors_stay=rejoins and in_place,
        rejoins=rejoins,
        rescues_state=can_join and not rejoins,
        replaces=can_join,
    )


def assign_contexts(
    infos: Sequence[WorkerInfo], *, generation: int, distributed: bool, num_cpus: float
) -> list[WorkerContext]:
    """Give every worker its ranks: world ranks in the order given, local ranks node by node.

    GPUs of a node are visible to all of its workers, in one order, so that NCCL can use the
    direct paths between them; each worker gets the index of its own.
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
    """Return the rank whose state counts: the lowest of those with most committed steps.

    One survivor may have finished the step in which another failed; its update must not be lost.
    A partly updated state counts only if there is no other.

    >>> choose_leader([Progress(global_step=4), Progress(global_step=5), Progress(global_step=5)])
    1
    """

    def key(rank: int) -> tuple[bool, int, int]:
        return not progress[rank].partial, progress[rank].global_step, -rank

    return max(range(len(progress)), key=key)


def furthest(progress: Sequence[Progress]) -> Progress:
    """Return how far the group is: the leader's progress, with the samples that most know of.

    Replacement workers do not know what was trained on in a call before they joined.
    """
    leader = progress[choose_leader(progress)]
    covered = [p.num_covered for p in progress if p.num_covered is not None]
    return replace(leader, num_covered=max(covered, default=None))


def backoff_s(attempt: int, config: ElasticConfig, draw: float) -> float:
    """Return how long to wait, in seconds, after failed try `attempt` (from 0).

    Exponential, capped, then varied by the jitter; `draw` is a random number in 0..1.

    >>> [backoff_s(n, ElasticConfig(max_s=5.0), draw=0.5) for n in range(4)]
    [1.0, 2.0, 4.0, 5.0]
    """
    try:
        wait = min(config.max_s, config.initial_s * config.factor**attempt)
    except OverflowError:
        wait = config.max_s if config.initial_s else 0.0
    return max(0.0, wait * (1.0 + config.jitter * (2.0 * draw - 1.0)))


def may_resize(now: float, last_resize: float, replaces_lost: bool, config: ElasticConfig) -> bool:
    """Whether workers that are ready may join now; times in seconds of one clock."""
    return replaces_lost or now - last_resize >= config.resize_cooldown_s


def who_leaves(
    left_s: Mapping[int, float],
    *,
    num_workers: int,
    num_ready: int,
    min_workers: int,
    margin_s: float,
) -> list[int]:
    """Return which of the workers that are announced to go leave at the next step.

    Whoever has a successor leaves at once, and whoever has none when `margin_s` is left to it. One
    stays in any case, since it has the state, unless a single worker has its successor; and
    ``min_workers`` stay.

    Args:
        left_s: the seconds that each of them has left, by rank.
        num_workers: how many workers there are now.
        num_ready: how many replacement workers can join.
        min_workers: the fewest workers to train with.
        margin_s: how long leaving may take.

    >>> who_leaves({0: 20, 2: 10}, num_workers=3, num_ready=1, min_workers=1, margin_s=3)
    [2]
    >>> who_leaves({0: 2, 1: 2}, num_workers=2, num_ready=0, min_workers=1, margin_s=3)
    [0]
    >>> who_leaves({0: 20}, num_workers=1, num_ready=1, min_workers=1, margin_s=3)
    [0]
    """
    in_order = sorted(left_s, key=lambda rank: (left_s[rank], rank))
    due = [rank for rank in in_order[num_ready:] if left_s[rank] <= margin_s]
    most = min(num_workers + num_ready - min_workers, num_workers - 1)
    if num_workers == 1:
        most = min(num_ready, 1)
    return [*in_order[:num_ready], *due][: max(0, most)]


def pause_step(progress: Sequence[Progress], notice_s: float = 0.1) -> int:
    """Return a step at which all workers can stop together.

    Workers that average gradients are never more than one step apart. The step is so far ahead
    that all hear of it in time: `notice_s` seconds, and two steps.

    >>> pause_step([Progress(global_step=7, step_s=0.05), Progress(global_step=8, step_s=0.05)])
    12
    """
    first = max(progress, key=lambda p: p.global_step)
    steps = math.ceil(notice_s / first.step_s) if first.step_s > 0 else 0
    return first.global_step + 2 + steps


def _gpu_key(gpu: str) -> tuple[int, int, str]:
    return (0, int(gpu), "") if gpu.isdigit() else (1, 0, gpu)
