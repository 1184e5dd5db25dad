"""The ranks and resources of a worker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """Ranks and resources of one worker in one generation.

    A generation is the time from one rendezvous to the next, with a fixed set of workers.
    """

    world_rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    generation: int = 0
    distributed: bool = False
    """Whether a process group exists. With ``num_workers=1`` there is none."""
    num_cpus: float = 1
    shares: tuple[float, ...] | None = None
    """Relative shares of the global batch set for nodes, by rank. None means equal shares."""
    is_alone: bool = False
    """Whether the process group has only this worker. True until a new worker joins the others."""
    in_driver: bool = False
    node_ip: str = "127.0.0.1"
    visible_gpus: tuple[str, ...] = ()
    """IDs of the GPUs of all workers on this node, in order. Every worker sees all of them."""
    gpu_index: int | None = None
    """Index of this worker's GPU among `visible_gpus`, or None without a GPU."""
