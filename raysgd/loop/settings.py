"""The settings of an operator on one worker."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from raysgd._internal.context import WorkerContext
from raysgd.loop.options import Options

logger = logging.getLogger(__name__)


@dataclass
class Settings:
    """The trainer's arguments, and the rank and resources of this worker."""

    options: Options
    context: WorkerContext = field(default_factory=WorkerContext)
    batch_share: int | None = None  # ``config[BATCH_SIZE]`` of the operator
    global_batch: int | None = None  # ``config[BATCH_SIZE]`` of the trainer
    _warned: set[str] = field(default_factory=set, repr=False)

    @property
    def full_size(self) -> int | None:
        """Number of workers in the full group if smaller groups keep its batch size, else None."""
        if self.options.num_shards is not None:
            return self.options.num_shards
        keeps = self.options.elastic.global_batch == "keep"
        return self.options.num_workers if keeps else None

    @property
    def placing(self) -> dict[str, Any]:
        """Arguments with which a source partitions data for the group."""
        full_size, num_shards = self.full_size, self.options.num_shards
        return {
            "world_size": self.context.world_size,
            "rank": self.context.world_rank,
            "full_size": full_size,
            "global_batch": None if full_size is None else self.global_batch,
            **({} if num_shards is None else {"num_shards": num_shards}),
        }

    def warn_once(self, key: str, message: str, *values: Any, anywhere: bool = False) -> None:
        """Log a warning, once for each `key`, on rank 0 or `anywhere`."""
        if (anywhere or self.context.world_rank == 0) and key not in self._warned:
            self._warned.add(key)
            logger.warning(message, *values)
