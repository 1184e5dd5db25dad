"""Where a worker runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """Where a worker runs."""

    node_id: str
    node_ip: str
    pid: int = 0
    gpu_ids: tuple[str, ...] = ()
    in_driver: bool = False
    hostname: str = ""
