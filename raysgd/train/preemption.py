"""Preemption information for training functions."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from raysgd._internal.context import Preemption

__all__ = ["PreemptionInfo", "agreed"]


@dataclass(frozen=True)
class PreemptionInfo:
    """The announced preemption of nodes with workers, with the attributes of Ray Train."""

    deadline_ms: int | None
    """Time of the first preemption in milliseconds since the epoch; None if not announced."""
    preempted_node_to_ranks: dict[str, list[int]]
    """Ranks of the workers on each preempted node, by Ray node ID."""

    @property
    def preempted_node_ids(self) -> list[str]:
        """Sorted IDs of the preempted nodes."""
        return sorted(self.preempted_node_to_ranks)

    @property
    def preempted_ranks(self) -> list[int]:
        """Sorted ranks of the affected workers."""
        return sorted({rank for ranks in self.preempted_node_to_ranks.values() for rank in ranks})


def agreed(preemption: Preemption | None) -> PreemptionInfo | None:
    """Return worker 0's announcement on all workers.

    Without a process group, return this worker's.
    """
    info = None
    if preemption is not None:
        deadline, ranks = preemption.deadline, preemption.ranks_by_node
        info = PreemptionInfo(
            None if deadline is None else round(1000 * deadline),
            {node: sorted(on_it) for node, on_it in ranks.items()},
        )
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return info
    held = [info]
    distributed.broadcast_object_list(held, src=0)
    return held[0]
