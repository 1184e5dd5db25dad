"""What a training function can know of workers that are going to be taken away."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from raysgd._internal.context import Preemption

__all__ = ["PreemptionInfo", "agreed"]


@dataclass(frozen=True)
class PreemptionInfo:
    """The announcement that nodes with workers are going to be taken away, as Ray Train has it."""

    deadline_ms: int | None
    """When the first of them is, in milliseconds since the epoch; None where no time was named."""
    preempted_node_to_ranks: dict[str, list[int]]
    """The ranks of the workers on each of them, by Ray's ids of the nodes."""

    @property
    def preempted_node_ids(self) -> list[str]:
        """The nodes, in order."""
        return sorted(self.preempted_node_to_ranks)

    @property
    def preempted_ranks(self) -> list[int]:
        """The ranks of all workers concerned, in order."""
        return sorted({rank for ranks in self.preempted_node_to_ranks.values() for rank in ranks})


def agreed(preemption: Preemption | None) -> PreemptionInfo | None:
    """Return what worker 0 knows, on all workers; without torch's processes what this one does."""
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
